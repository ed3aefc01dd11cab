"""The reference: upstream's trainer as it is, on the CPU's device layer, recorded bit for bit.

    python tests/oracle/record_run.py --out DIR --ranks N -- PRETRAIN_GPT_ARGS...     forks N ranks after one import
    python tests/oracle/record_run.py --jobs FILE                                     several, one after the other
    torchrun ... tests/oracle/record_run.py --out DIR -- PRETRAIN_GPT_ARGS...         is one rank

FILE holds a JSON list of jobs {"out": DIR, "ranks": N, "argv": [...]}.

Nothing of Deadpool's runtime is imported: what an undisturbed run does is decided here without it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.hotswap.preload import SINGLE_THREADED  # noqa: E402

# Before torch is imported, as torchrun does it: with more threads a sum may be taken in another order.
for _name, _value in SINGLE_THREADED.items():
    os.environ.setdefault(_name, _value)

from tests.oracle.forked import run_ranks  # noqa: E402
from tests.oracle.recorder import Recorder  # noqa: E402


def train_recorded(argv: list[str], directory: Path, rank: int) -> int:
    """Be one rank: train as ``argv`` says and record into ``directory``. The environment names the seat."""
    from megatron.hotswap import device
    from megatron.hotswap.gpt.entry import main

    device.install()
    directory.mkdir(parents=True, exist_ok=True)
    Recorder(directory, rank).attach()
    sys.argv = ["pretrain_gpt.py", *argv]
    return main()


def record(argv: list[str], directory: Path, ranks: int, *, seconds: float = 120) -> None:
    """Fork ``ranks`` ranks that train as ``argv`` says; their records and logs are in ``directory`` afterwards."""
    from megatron.hotswap.preload import preload

    preload()
    run_ranks(ranks, lambda rank: train_recorded(argv, directory, rank), logs=directory / "logs", seconds=seconds)


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for the records and logs")
    parser.add_argument("--ranks", type=int, help="number of ranks to fork; default: be the rank that RANK names")
    parser.add_argument("--jobs", type=Path, help="file with several jobs, instead of --out, --ranks and arguments")
    parser.add_argument("--seconds", type=float, default=600, help="limit for each job, in seconds (default 600)")
    parser.add_argument("argv", nargs=argparse.REMAINDER, help="-- and the arguments of pretrain_gpt.py")
    options = parser.parse_args()
    if options.jobs is not None:
        for job in json.loads(options.jobs.read_text()):
            record(job["argv"], Path(job["out"]), job["ranks"], seconds=options.seconds)
        return 0
    if options.out is None:
        parser.error("--out or --jobs is needed")
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if options.ranks is None:
        return train_recorded(argv, options.out, int(os.environ["RANK"]))
    record(argv, options.out, options.ranks, seconds=options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
