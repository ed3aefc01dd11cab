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

from deadpool_ext.control.operator_client import is_running
from deadpool_ext.control.progress import ProgressPrinter
from deadpool_ext.control.rundir import EVENTS, FINAL, STATUS, STEPS
from deadpool_ext.protocol.types import UsageError

OVER: Final = frozenset({"stopped", "interrupted"})
#: Several an iteration: passed over before they are parsed.
_FREQUENT: Final = tuple(f'"event": "{name}"'.encode() for name in ("gate_wait", "snapshot_sealed", "replica_sealed"))
_TAIL_BYTES: Final = 4 << 20
STILL_SHOWN_S: Final = 5.0
_PLACES_OF_WAITING: Final = frozenset({"gate", "setup", "recovery"})
_NEVER_WRAPPED: Final = 10_000  # columns: a terminal breaks lines by itself, and in a pipe a line stays a line


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What a run directory says at one moment."""

    directory: Path
    status: dict[str, Any]
    exit_code: int | None  # once the job has ended by itself
    age_s: float  # since the last file of the run was written
    last_step: dict[str, Any] | None
    events: tuple[dict[str, Any], ...]  # the last ones, oldest first, without those of every iteration
    running: bool | None  # whether the coordinator was there just now; None: cannot be told from here
    told: tuple[tuple[float, str], ...]  # the last ones that people are told: unix seconds and a line

    @property
    def over(self) -> bool:
        """The job has ended, or was ended."""
        return self.status.get("state") in OVER or self.running is False

    def to_json(self) -> dict[str, Any]:
        """One plain object for scripts."""
        return self.status | {
            "run_dir": str(self.directory),
            "running": self.running,
            "exit_code": self.exit_code,
            "age_seconds": round(self.age_s, 3),
            "last_step": self.last_step,
            "events": list(self.events),
        }


def read_status(directory: Path, events: int) -> RunStatus:
    """Read a run directory. Raises UsageError if it is none, or if the job has not begun."""
    try:
        status = json.loads((directory / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{directory}: no {STATUS} there: no run directory, or the job has not begun") from error
    except NotADirectoryError as error:
        raise UsageError(f"{directory} is a file, no run directory") from error
    except ValueError as error:
        raise UsageError(f"{directory / STATUS} is damaged ({error})") from error
    except OSError as error:
        raise UsageError(f"{directory / STATUS}: {error.strerror or error}") from error
    steps = _tail(directory / STEPS)
    records = _tail(directory / EVENTS)
    recent = [record for record in records if record.get("event") != "step"]
    printer = ProgressPrinter()
    lines = ((float(record.get("t", 0.0)), printer.event_line(record)) for record in records)
    told = [(when, text) for when, text in lines if text is not None]
    return RunStatus(
        directory=directory,
        status=status,
        exit_code=_exit_code(directory / FINAL),
        running=False if status.get("state") in OVER else is_running(directory),
        age_s=max(0.0, time.time() - max(_written(directory / name) for name in (STATUS, STEPS, EVENTS))),
        last_step=steps[-1] if steps else None,
        events=tuple(recent[-events:] if events else ()),
        told=tuple(told[-events:] if events else ()),
    )


def _exit_code(path: Path) -> int | None:
    try:
        code = json.loads(path.read_text(encoding="utf-8")).get("code")
    except (OSError, ValueError):
        return None
    return code if isinstance(code, int) else None


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _tail(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines at the end of a file, without the frequent events; none if there is no such file."""
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
        if any(mark in line for mark in _FREQUENT):
            continue
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def render(run: RunStatus) -> Group:
    """Tables for people."""
    status = run.status
    head = Text(f"job {status.get('job_id')}  {_state(run)}", style="bold")
    if status.get("degraded") and not run.over:
        head.append("  degraded: another loss may not be survived", style="bold yellow")
    facts = (
        f"generation {status.get('generation')}  failures {status.get('failures')}  "
        f"recoveries {status.get('recoveries')}  last written {_age(run.age_s)} ago"
    )
    parts: list[Any] = [head, Text(facts)]
    if run.last_step is not None:
        line = ProgressPrinter().step_line(run.last_step).partition("  generation")[0]
        parts.append(Text(f"last finished {line}"))
    parts.append(_node_table(status))
    parts += [Text(line, style="yellow") for line in _still(status) if not run.over]
    # Not cut to the terminal's width: the end of a line is its reason.
    parts += [Text(f"{time.strftime('%H:%M:%S', time.localtime(when))} {text}") for when, text in run.told]
    return Group(*parts)


def _state(run: RunStatus) -> str:
    state, reason = str(run.status.get("state")), run.status.get("reason")
    if not run.over:
        return state if run.running else f"{state}, when last heard of: its coordinator does not answer"
    if state not in OVER:
        return f"not running any more: it was killed while {state}"
    if run.exit_code == 0:
        return "done"
    if reason and str(reason).startswith(state):
        return str(reason)
    code = f" with exit code {run.exit_code}" if run.exit_code is not None else ""
    return f"{state}{code}: {reason or 'no reason was given'}"


def _age(seconds: float) -> str:
    """``12 s``, ``3 min``, ``5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _node_table(status: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("node", "role", "seats"):
        table.add_column(column)
    for node, row in (status.get("nodes") or {}).items():
        seats = " ".join(str(seat) for seat in row.get("seats", ())) or "-"
        table.add_row(node, f"{row.get('role')}{'' if row.get('ready') else ', not warm yet'}", seats)
    for node, reason in (status.get("lost") or {}).items():
        table.add_row(node, "lost", str(reason), style="red")
    return table


def _still(status: Mapping[str, Any]) -> list[str]:
    """Ranks that do not move and wait for nobody."""
    return [
        f"rank {row['rank']} on {row['node']} stands still in {row['place']} of iteration {row['iteration']} "
        f"for {_age(row['still_s'])}"
        for row in status.get("ranks") or ()
        if row["still_s"] >= STILL_SHOWN_S and not row["waits"] and row["place"] not in _PLACES_OF_WAITING
    ]


@click.command(short_help="How a run stands: state, nodes, seats, recent events.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--watch", is_flag=True, help="Stay and refresh until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object (with --watch: one a line).")
@click.option("--events", default=8, show_default=True, type=click.IntRange(0), help="How many recent events to show.")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.05), help="Seconds, with --watch.")
def status(directory: Path, watch: bool, as_json: bool, events: int, interval: float) -> None:
    """Show state, nodes, seats and recent events of the run whose run directory is DIR, running or over.

    A job that was killed from outside could not say so: its coordinator is asked whether it is still there.
    """
    run = read_status(directory, events)
    if as_json:
        click.echo(json.dumps(run.to_json()))
        while watch and not run.over:
            time.sleep(interval)
            run = read_status(directory, events)
            click.echo(json.dumps(run.to_json()))
        return
    if not watch:
        Console(width=_NEVER_WRAPPED).print(render(run))
        return
    console = Console()
    with Live(render(run), console=console, auto_refresh=False) as live:
        while not run.over:
            time.sleep(interval)
            run = read_status(directory, events)
            live.update(render(run), refresh=True)
