"""The demo of ``scripts/quickstart.sh``: one training run left alone, one that loses a node, and the proof.

``python -m deadpool_ext.cli.demo``. It drives the same commands that a user would type, so it needs a checkout.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

import deadpool_ext
from deadpool_ext.cli.main import run
from deadpool_ext.protocol.types import DeadpoolError, UsageError
from deadpool_ext.rundir.compare import first_difference, read_run, summary
from deadpool_ext.rundir.summary import read_events, read_final, render, summarize

CHECKOUT = Path(deadpool_ext.__file__).resolve().parents[1]
ARGUMENTS = Path("examples", "tiny_gpt", "args.txt")
NODES, RANKS_PER_NODE, SPARES = 4, 2, 1
CORPUS_MB = 4
RUN_DEADLINE_S = 300.0
DATA_DEADLINE_S = 120.0
STOP_GRACE_S = 20.0


class DemoError(DeadpoolError):
    """A step of the demo failed; what it printed stands above."""

    exit_code = 1


def say(text: str) -> None:
    """One line of the demo's own, marked."""
    click.echo(click.style(f"==> {text}", bold=True))


def train_arguments(corpus: Path, index_cache: Path) -> list[str]:
    """Arguments of ``pretrain_gpt.py`` for the tiny GPT on ``corpus`` (a prefix made by ``deadpool data``)."""
    page = CHECKOUT / ARGUMENTS
    if not page.is_file():
        raise UsageError(f"{page} is missing: the demo runs from a checkout")
    flags = shlex.split(page.read_text(encoding="utf-8"), comments=True)
    data = ["--data-path", str(corpus), "--data-cache-path", str(index_cache)]
    return ["--deadpool", *data, "--tokenizer-type", "NullTokenizer", "--vocab-size", "257", *flags]


def deadpool(arguments: Sequence[str], deadline_s: float, *, quiet: bool = False) -> int:
    """Run ``deadpool ARGUMENTS`` with this interpreter, its output to the terminal; returns its exit code.

    ``quiet``: without its standard output.

    Past the deadline, or on Ctrl-C, it is asked to end, then killed with everything it started.
    """
    # The tiny job has more ranks than a machine has GPUs; it is meant for the CPU everywhere.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "deadpool_ext.cli.main", *arguments],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.DEVNULL if quiet else None,
    )
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise DemoError(f"deadpool {arguments[0]} took longer than {deadline_s:g} s") from None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        # Its children die with it: every process of a local job asks the kernel for that.
        process.kill()
        process.wait()


def run_job(directory: Path, training: Sequence[str], faults: Sequence[str]) -> float:
    """One job in ``directory``; returns its wall-clock seconds. Raises :class:`DemoError` unless it ends well."""
    shape = ["--nodes", NODES, "--ranks-per-node", RANKS_PER_NODE, "--spares", SPARES]
    strikes = [word for fault in faults for word in ("--fault", fault)]
    script = ["--", str(CHECKOUT / "pretrain_gpt.py"), *training]
    started = time.monotonic()
    code = deadpool(["local", *map(str, shape), "--run-dir", str(directory), *strikes, *script], RUN_DEADLINE_S)
    if code != 0:
        raise DemoError(f"the run in {directory} ended with exit code {code}; its logs are in {directory / 'logs'}")
    return time.monotonic() - started


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), default=CHECKOUT / "runs" / "demo", show_default=True,
              help="Where data and both runs go; the runs of an earlier demo there are replaced.")  # fmt: skip
@click.option("--node", default="n2", show_default=True, help="The node to kill.")
@click.option("--step", type=click.IntRange(min=1), default=6, show_default=True, help="At which iteration.")
@click.option("--phase", default="backward", show_default=True, help="In which phase of it.")
def demo(run_dir: Path, node: str, step: int, phase: str) -> None:
    """Train a small GPT twice, kill a node in the second run, and show that the results are the same, bit for bit."""
    run_dir = run_dir.absolute()
    alone, struck = run_dir / "undisturbed", run_dir / "disturbed"
    for directory in (alone, struck):
        shutil.rmtree(directory, ignore_errors=True)
    corpus = run_dir / "data" / "stdlib"
    if not corpus.with_suffix(".idx").exists():
        say("text: the Python standard library")
        make = ["data", "stdlib", "--output", str(corpus), "--limit-mb", str(CORPUS_MB), "--force"]
        if deadpool(make, DATA_DEADLINE_S, quiet=True) != 0:
            raise DemoError("making the data failed")
    training = train_arguments(corpus, run_dir / "data" / "index")

    say(f"a GPT, TP2 x PP2 x DP2, on {NODES} nodes of {RANKS_PER_NODE} ranks, {SPARES} spare; nobody disturbs it")
    alone_s = run_job(alone, training, ())
    say(f"the same again, but node {node} is killed at iteration {step}, {phase}")
    struck_s = run_job(struck, training, (f"kill-node:node={node},step={step},phase={phase}",))

    told = summarize(read_events(struck / "events.jsonl"), read_final(struck / "final.json"))
    if not told.recoveries:
        raise DemoError(f"the disturbed run recorded no recovery: see {struck / 'events.jsonl'}")
    say("what happened")
    for line in render(told):
        click.echo(f"    {line}")
    click.echo(f"    wall clock     {alone_s:.1f} s undisturbed, {struck_s:.1f} s with the failure, start-up included")
    a, b = read_run(alone), read_run(struck)
    difference = first_difference(a, b)
    if difference is not None:
        raise DemoError(f"the runs differ: {difference}")
    say(summary(a, b))
    click.echo(f"    check it yourself: deadpool compare {alone} {struck}")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], demo, "demo"))
