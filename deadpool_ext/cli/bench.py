"""``deadpool bench``: campaigns on this machine, rerun by anyone."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from deadpool_ext.protocol.types import UsageError

RUN_SECONDS = 240.0
DECISIONS = ("transient", "permanent", "script", "none")


@click.group(short_help="Campaigns of faults and measurements on this machine.")
def bench() -> None:
    """Measure, and show that what is promised holds."""


@bench.command(short_help="Real runs that are broken at random places.")
@click.option("--single", is_flag=True, help="One failure at a time. (The only campaign there is so far.)")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws kinds and places.")
@click.option("--failures", type=click.IntRange(min=1), default=34, show_default=True, help="Faults in all.")
@click.option("--per-run", type=click.IntRange(1, 6), default=3, show_default=True, help="Faults in a run, in turn.")
@click.option("--kinds", help="Only these kinds, separated by commas.  [default: all that are available]")
@click.option("--nodes", type=click.IntRange(min=2), default=4, show_default=True, help="Nodes that train.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks on each.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Keep runs and results.json here.")
@click.pass_context
def chaos(
    context: click.Context,
    single: bool,
    seed: int,
    failures: int,
    per_run: int,
    kinds: str | None,
    nodes: int,
    ranks_per_node: int,
    output: Path | None,
) -> None:
    """Train the tiny GPT again and again, break it on the way, and compare every run, bit for bit, with a calm one.

    Prints which class was decided for which kind of fault, what recoveries cost (from the injection to the end of the
    first new step), and every run that differs. Exit code 1 if one does, or if a class is not the expected one.
    """
    from deadpool_ext.bench import trials

    if not single:
        raise UsageError("bench chaos: give --single (one failure at a time)")
    shape = trials.Shape(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        per_run=per_run,
        **({"kinds": tuple(kinds.split(","))} if kinds else {}),
    )
    drawn = trials.draw(shape, seed, failures)
    with tempfile.TemporaryDirectory(prefix="deadpool-chaos-") as scratch:
        directory = output if output is not None else Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        context.exit(_campaign(directory.absolute(), shape, drawn, seed))


def _campaign(directory: Path, shape: Any, drawn: Sequence[Any], seed: int) -> int:
    from deadpool_ext.bench import jobs, outcomes
    from deadpool_ext.bench.trials import DEADLINES, EXPECTED
    from deadpool_ext.cli.main import run as deadpool
    from deadpool_ext.rundir.compare import first_difference, read_run
    from deadpool_ext.rundir.summary import read_events

    console = Console(width=120)
    jobs.prepare()  # first: it sets what libraries read when they are loaded, which making data does too
    corpus = directory / "data" / "stdlib"
    if not corpus.with_suffix(".idx").exists() and deadpool(
        ["data", "stdlib", "--output", str(corpus), "--limit-mb", "1", "--force"]
    ):
        raise jobs.BenchError("making the data failed")

    def start(name: str, spares: int, faults: Sequence[str], iterations: int) -> tuple[Path, int]:
        place = directory / name
        options = jobs.options(
            place,
            jobs.tiny_gpt(corpus, iterations),
            nodes=shape.nodes,
            ranks_per_node=shape.ranks_per_node,
            spares=spares,
            faults=faults,
            deadlines=dict(DEADLINES),
        )
        return place, jobs.run(options, directory / f"{name}.out", RUN_SECONDS)

    calm: dict[int, Path] = {}
    found: list[outcomes.Outcome] = []
    wrong: list[str] = []
    for trial in drawn:
        if trial.iterations not in calm:
            calm[trial.iterations], code = start(f"calm-{trial.iterations}", 0, (), trial.iterations)
            if code:
                raise jobs.BenchError(f"the calm run ended with exit code {code}; see {directory}")
        place, code = start(f"run-{trial.number:03}", trial.spares, trial.faults, trial.iterations)
        difference = (
            f"exit code {code}" if code else first_difference(read_run(calm[trial.iterations]), read_run(place))
        )
        mine = outcomes.outcomes(read_events(place / "events.jsonl"), _steps(place))
        found += mine
        if difference is None and len(mine) < len(trial.faults):
            difference = f"{len(trial.faults) - len(mine)} faults did not happen"
        told = " ".join(f"{outcome.kind}={outcome.decided}" for outcome in mine)
        if difference:
            wrong.append(f"run {trial.number} ({' '.join(trial.faults)}): {difference}")
        wrong += [
            f"run {trial.number}: {outcome.kind} was decided to be {outcome.decided} ({outcome.evidence})"
            for outcome in mine
            if outcome.decided != EXPECTED[outcome.kind]
        ]
        console.print(f"run {trial.number:3}  {told}  {difference or 'identical'}", highlight=False)
    _show(console, found)
    results = {
        "seed": seed,
        "shape": dataclasses.asdict(shape),
        "outcomes": [dataclasses.asdict(outcome) for outcome in found],
        "wrong": wrong,
    }
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for line in wrong:
        console.print(f"WRONG {line}", highlight=False)
    console.print(f"{len(drawn)} runs, {len(found)} failures, seed {seed}: {len(wrong)} wrong", highlight=False)
    return 1 if wrong else 0


def _steps(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "steps.jsonl").read_text(encoding="utf-8").splitlines()]


def _show(console: Console, found: Sequence[Any]) -> None:
    from deadpool_ext.bench import outcomes

    matrix = outcomes.confusion(found)
    table = Table(title="decided class by injected kind", title_justify="left")
    table.add_column("injected", no_wrap=True)
    for decision in DECISIONS:
        table.add_column(decision, justify="right")
    for kind, row in sorted(matrix.items()):
        table.add_row(kind, *(str(row[decision] or "") for decision in DECISIONS))
    console.print(table)
    table = Table(title="seconds from the injection to the end of the first new step", title_justify="left")
    for column in ("injected", "n", "detect", "median", "worst", "median - step", "worst - step"):
        table.add_column(column, justify="left" if column == "injected" else "right", no_wrap=True)
    for kind, cost in outcomes.costs(found).items():
        values = (cost.detect, cost.median, cost.worst, cost.beyond_median, cost.beyond_worst)
        table.add_row(kind, str(cost.count), *(f"{value:.2f}" for value in values))
    console.print(table)
