#!/usr/bin/env bash
# Builds the environment if needed, then runs what this machine can run, and says what it leaves out and why.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<'TEXT'
Usage: scripts/test.sh [--full] [--lint] [--unit] [--integration] [--cluster] [--gpu] [PYTEST ARGUMENT...]

Without a choice: lint, unit and property, integration, and cluster and gpu tests where the machine allows them.
  --lint         ruff, mypy and the import rules only (may be combined with the others)
  --unit         unit and property tests only: seconds
  --integration  tests that start processes on this machine: minutes
  --cluster      tests on a Slurm cluster of virtual nodes: need root and Slurm
  --gpu          tests that need an NVIDIA GPU
  --full         also the tests marked slow
Anything else goes to pytest; paths replace the choice of folders: scripts/test.sh tests/unit/cli -k compare

Exit code: 0 everything chosen passed; 1 something failed; 2 the choice cannot run here.
PYTHON= chooses the interpreter, DEADPOOL_TEST_SEED= repeats a run's seed, DEADPOOL_TEST_MINUTES= its limit (35).
TEXT
}

say() { printf 'test: %s\n' "$*" >&2; }

full=false lint=false chosen=() rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --full) full=true ;;
        --lint) lint=true ;;
        --unit) chosen+=(unit property) ;;
        --integration) chosen+=(integration) ;;
        --cluster) chosen+=(cluster) ;;
        --gpu) chosen+=(gpu) ;;
        -h | --help) usage; exit 0 ;;
        --) shift; rest+=("$@"); break ;;
        *) rest+=("$1") ;;
    esac
    shift
done
everything=false
if ! $lint && [ ${#chosen[@]} -eq 0 ] && [ ${#rest[@]} -eq 0 ]; then
    everything=true lint=true
    chosen=(unit property integration cluster gpu)
fi

# shellcheck source=scripts/lib/env.sh
. "$root/scripts/lib/env.sh"
deadpool_env "$root"
cd "$root"

# Why tests of one kind cannot run here; nothing when they can.
why_not() {
    local kind=$1
    if [ -z "$(find "tests/$kind" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
        echo "there are none yet"
        return
    fi
    case $kind in
        gpu) "$DEADPOOL_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
            echo "no usable NVIDIA GPU" ;;
        cluster)
            if [ "$(id -u)" != 0 ]; then
                echo "needs root for network namespaces"
            elif ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
                echo "no Slurm (on Debian and Ubuntu: the packages slurmctld slurmd slurm-client munge)"
            fi ;;
    esac
}

failed=0
check() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then
        say "$name: ok"
    else
        printf '%s\n' "$output" | tail -n 60
        say "$name: FAILED"
        failed=1
    fi
}

if $lint; then
    check "ruff check" "$DEADPOOL_PYTHON" -m ruff check .
    check "ruff format" "$DEADPOOL_PYTHON" -m ruff format --check .
    check "mypy" "$DEADPOOL_PYTHON" -m mypy
    check "import rules" lint-imports --no-logo
fi

paths=()
for kind in ${chosen[@]+"${chosen[@]}"}; do
    reason=$(why_not "$kind")
    if [ -z "$reason" ]; then
        paths+=("tests/$kind")
    else
        say "skipped: $kind tests ($reason)"
        # Asked for by name and impossible is an error; left out of a default run it is not.
        $everything || [ "$kind" = property ] || failed=2
    fi
done
if [ ${#paths[@]} -eq 0 ] && [ ${#rest[@]} -eq 0 ]; then
    exit $failed
fi

marker=(-m "not slow")
if $full; then
    marker=()
else
    say "skipped: tests marked slow (--full runs them)"
fi

# One thread per process: the tests start many processes on few cores, and results are then the same everywhere.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
code=0
timeout -k 20 "$((${DEADPOOL_TEST_MINUTES:-35} * 60))" \
    "$DEADPOOL_PYTHON" -m pytest -q ${marker[@]+"${marker[@]}"} ${paths[@]+"${paths[@]}"} ${rest[@]+"${rest[@]}"} || code=$?
[ $code -ne 124 ] || say "stopped: longer than ${DEADPOOL_TEST_MINUTES:-35} minutes"
if [ $code -ne 0 ]; then
    exit 1
fi
[ $failed -eq 0 ] || say "the tests passed, but see above"
exit $failed
