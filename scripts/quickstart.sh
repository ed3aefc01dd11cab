#!/usr/bin/env bash
# Builds the environment if needed, then runs the demo: a training job loses a node and ends as if it had not.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
    -h | --help)
        cat <<'TEXT'
Usage: scripts/quickstart.sh [DEMO OPTION...]

Makes .venv (once: some minutes, 5 GB), then trains a small GPT twice on this machine's CPU, kills a node in the
second run, and compares the two. Options go to the demo: --node n2 --step 6 --phase backward --run-dir DIR.

PYTHON= chooses the interpreter; DEADPOOL_VENV_CACHE= says where the packages go (default ~/.cache/deadpool).
TEXT
        exit 0
        ;;
esac

# shellcheck source=scripts/lib/env.sh
. "$root/scripts/lib/env.sh"
deadpool_env "$root"
exec "$DEADPOOL_PYTHON" -m deadpool_ext.cli.demo "$@"
