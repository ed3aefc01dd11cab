"""``deadpool status``: how a run stands, from its run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deadpool_ext.control.progress import ProgressPrinter
from deadpool_ext.control.rundir import EVENTS, STATUS, STEPS
from deadpool_ext.protocol.types import UsageError

OVER: Final = frozenset({"stopped", "interrupted"})
_QUIET: Final = frozenset({"step", "gate_wait", "snapshot_sealed", "replica_sealed"})
_TAIL_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What a run directory says at one moment."""

    directory: Path
    status: dict[str, Any]
    last_step: dict[str, Any] | None
    events: tuple[dict[str, Any], ...]  # the last ones, oldest first, without the frequent kinds

    @property
    def over(self) -> bool:
        """The job has ended."""
        return self.status.get("state") in OVER

    def to_json(self) -> dict[str, Any]:
        """One plain object for scripts."""
        return self.status | {
            "run_dir": str(self.directory),
            "last_step": self.last_step,
            "events": list(self.events),
        }


def read_status(directory: Path, events: int) -> RunStatus:
    """Read a run directory. Raises UsageError if it is none, or if the job has not begun."""
    try:
        status = json.loads((directory / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{directory}: no {STATUS} there: no run directory, or the job has not begun") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory / STATUS}: {error}") from error
    steps = _tail(directory / STEPS)
    recent = [record for record in _tail(directory / EVENTS) if record.get("event") not in _QUIET]
    return RunStatus(
        directory=directory,
        status=status,
        last_step=steps[-1] if steps else None,
        events=tuple(recent[-events:] if events else ()),
    )


def _tail(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines at the end of a file; none if there is no such file."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, 2) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    whole = lines[1 if start else 0 : -1]  # the last piece is empty, or a line that is being written
    records = []
    for line in whole:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def render(run: RunStatus) -> Group:
    """Tables for people."""
    status = run.status
    head = Text(f"job {status.get('job_id')}  {status.get('state')}", style="bold")
    if status.get("degraded"):
        head.append("  degraded: another loss may not be survived", style="bold yellow")
    facts = (
        f"generation {status.get('generation')}  iteration {status.get('iteration')}  "
        f"failures {status.get('failures')}  recoveries {status.get('recoveries')}"
    )
    parts: list[Any] = [head, Text(facts)]
    if status.get("reason"):
        parts.append(Text(f"reason: {status['reason']}"))
    if run.last_step is not None:
        parts.append(Text(ProgressPrinter().step_line(run.last_step).split("  spares")[0]))
    parts.append(_node_table(status))
    if run.events:
        printer = ProgressPrinter()
        parts += [Text(printer.event_line(record), overflow="ellipsis", no_wrap=True) for record in run.events]
    return Group(*parts)


def _node_table(status: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("node", "role", "ready", "seats"):
        table.add_column(column)
    for node, row in (status.get("nodes") or {}).items():
        seats = " ".join(str(seat) for seat in row.get("seats", ())) or "-"
        table.add_row(node, str(row.get("role")), "yes" if row.get("ready") else "no", seats)
    for node, reason in (status.get("lost") or {}).items():
        table.add_row(node, "lost", "", str(reason), style="red")
    return table


@click.command(short_help="How a run stands.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--watch", is_flag=True, help="Stay and refresh until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object (with --watch: one a line).")
@click.option("--events", default=8, show_default=True, type=click.IntRange(0), help="How many recent events to show.")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.05), help="Seconds, with --watch.")
def status(directory: Path, watch: bool, as_json: bool, events: int, interval: float) -> None:
    """Show state, nodes, seats and recent events of the run in DIR."""
    run = read_status(directory, events)
    if as_json:
        click.echo(json.dumps(run.to_json()))
        while watch and not run.over:
            time.sleep(interval)
            run = read_status(directory, events)
            click.echo(json.dumps(run.to_json()))
        return
    console = Console()
    if not watch:
        console.print(render(run))
        return
    with Live(render(run), console=console, auto_refresh=False) as live:
        while not run.over:
            time.sleep(interval)
            run = read_status(directory, events)
            live.update(render(run), refresh=True)
