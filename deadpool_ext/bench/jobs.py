"""Many runs of ``deadpool local`` from one process that has imported the trainer once."""

from __future__ import annotations

import os
import select
import shlex
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import deadpool_ext
from deadpool_ext.control import launcher
from deadpool_ext.control.progress import ProgressPrinter
from deadpool_ext.protocol.types import DeadpoolError, UsageError

CHECKOUT = Path(deadpool_ext.__file__).resolve().parents[1]
SCRIPT = CHECKOUT / "pretrain_gpt.py"
ARGUMENTS = CHECKOUT / "examples" / "tiny_gpt" / "args.txt"


class BenchError(DeadpoolError):
    """A run of a campaign did not end as it must."""

    exit_code = 1


def tiny_gpt(corpus: Path, iterations: int) -> list[str]:
    """Arguments of ``pretrain_gpt.py`` for the tiny GPT on ``corpus`` (a prefix made by ``deadpool data``)."""
    if not ARGUMENTS.is_file():
        raise UsageError(f"{ARGUMENTS} is missing: a campaign runs from a checkout")
    words = shlex.split(ARGUMENTS.read_text(encoding="utf-8"), comments=True)
    words[words.index("--train-iters") + 1] = str(iterations)
    # The learning rate's schedule must not depend on where a run ends: runs of different length share a calm one.
    schedule = ["--lr-decay-iters", "1000"]
    data = ["--data-path", str(corpus), "--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]
    return ["--deadpool", *data, *schedule, *words]


def prepare() -> None:
    """Import the trainer, once. The tiny job is meant for the CPU everywhere."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    launcher.preload(launcher.PRELOAD_PROTECTED, ProgressPrinter(), None)


def run(options: launcher.LocalOptions, output: Path, seconds: float) -> int:
    """One run in a forked process, its output to a file; returns its exit code. Raises :class:`BenchError` if it takes
    longer than ``seconds``; nothing of it is left then."""
    pid = launcher.fork_child(partial(launcher.run_local, options), output)
    descriptor = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([descriptor], [], [], seconds)
        if not ended:
            os.kill(pid, signal.SIGKILL)  # its processes die with it
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not ended:
            raise BenchError(f"the run in {options.run_dir} took longer than {seconds:g} s; its output is in {output}")
        return status
    finally:
        os.close(descriptor)


def options(
    run_dir: Path,
    training: Sequence[str],
    *,
    nodes: int,
    ranks_per_node: int,
    spares: int,
    faults: Sequence[str] = (),
    deadlines: dict[str, float] | None = None,
) -> launcher.LocalOptions:
    """Options of one run."""
    return launcher.LocalOptions(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        spares=spares,
        argv=(str(SCRIPT), *training),
        run_dir=run_dir,
        faults=tuple(faults),
        preload=launcher.PRELOAD_PROTECTED,
        deadlines=deadlines or {},
    )
