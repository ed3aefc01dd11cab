"""What happened to a run, told from its events and its result: who died, who took over, how long each phase took."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_ext.rundir.compare import RunRecordError

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """One recovery. ``seconds``: by phase, with ``total``. ``moved``: node that left -> (node that came, seats)."""

    classes: tuple[str, ...]  # one line per failure: what, and how it was classified
    planned: str  # what moved, where it was a planned swap
    moved: Mapping[str, tuple[str, tuple[int, ...]]]
    version: int
    steps_replayed: int
    nbytes: int
    sources: Mapping[str, int]
    seconds: Mapping[str, float]
    redundancy_s: float | None  # from the failure until every copy existed again


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The whole run. ``same_process``: seats that ended in the very process they started in."""

    code: int | None
    reason: str
    iterations: int
    seats: int
    same_process: int
    recoveries: tuple[Recovery, ...]


def read_events(path: Path) -> list[Event]:
    """The lines of ``events.jsonl``; one cut off by a crash is left out. Raises :class:`RunRecordError`."""
    events: list[Event] = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
            if line.endswith("\n") and line.strip():
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"line {number} is no object")
                events.append(record)
    except (OSError, ValueError) as error:
        raise RunRecordError(f"{path}: {error}") from error
    return events


def read_final(path: Path) -> Mapping[str, Any]:
    """The content of ``final.json``. Raises :class:`RunRecordError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunRecordError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise RunRecordError(f"{path}: not an object")
    return content


def summarize(events: Sequence[Event], final: Mapping[str, Any]) -> RunSummary:
    """Put the events of each recovery together."""
    recoveries: list[Recovery] = []
    classes: list[str] = []
    moved: dict[str, tuple[str, tuple[int, ...]]] = {}
    placed: dict[int, str] = {}
    for event in events:
        match event.get("event"):
            case "failure_classified":
                who = event.get("node") if event.get("rank") is None else f"seat {event['rank']}"
                classes.append(f"{who}: {event.get('class')} ({event.get('reason')})")
            case "generation_start":
                now = {int(seat): node for node, seats in event.get("seats", {}).items() for seat in seats}
                for seat, node in now.items():
                    before = placed.get(seat, node)
                    if before != node:
                        moved[before] = (node, (*moved.get(before, (node, ()))[1], seat))
                placed = now
            case "recovery_done":
                recoveries.append(
                    Recovery(
                        classes=tuple(classes),
                        planned=str(event.get("planned", "")),
                        moved=dict(moved),
                        version=int(event["version"]),
                        steps_replayed=int(event["steps_replayed"]),
                        nbytes=int(event["bytes"]),
                        sources=event.get("sources", {}),
                        seconds=event["seconds"],
                        redundancy_s=_redundancy(events, event),
                    )
                )
                classes.clear()
                moved.clear()
    seats = final.get("seats", [])
    return RunSummary(
        code=final.get("code"),
        reason=str(final.get("reason", "")),
        iterations=int(final.get("iterations", 0)),
        seats=len(seats),
        same_process=sum(1 for seat in seats if seat.get("process_start") == seat.get("process_end") is not None),
        recoveries=tuple(recoveries),
    )


def _redundancy(events: Iterable[Event], done: Event) -> float | None:
    """Seconds until the copies of that recovery's generation were complete; None when they never were."""
    for event in events:
        if event.get("event") == "redundancy_restored" and event.get("generation") == done.get("generation"):
            return float(event["seconds"])
    return None


def render(summary: RunSummary) -> list[str]:
    """The summary as lines for a terminal."""
    lines: list[str] = []
    for recovery in summary.recoveries:
        lines += _render_recovery(recovery)
    replaced = summary.seats - summary.same_process
    lines.append(f"processes      {summary.same_process} of {summary.seats} seats never changed theirs; {replaced} did")
    lines.append(f"iterations     {summary.iterations}; {summary.reason}")
    return lines


def _render_recovery(recovery: Recovery) -> list[str]:
    lines = [f"died           {line}" for line in recovery.classes]
    if recovery.planned:
        lines.append(f"planned        {recovery.planned}")
    for old, (new, seats) in recovery.moved.items():
        lines.append(f"took over      {new} fills {old}'s seats {', '.join(map(str, sorted(seats)))}")
    phases = ", ".join(f"{name} {value:.3f}" for name, value in recovery.seconds.items() if name != "total")
    planned = bool(recovery.planned) and not recovery.classes
    since = "training stood still, to the end of the next step" if planned else "from the failure to the first new step"
    lines.append(f"seconds        {recovery.seconds.get('total', 0.0):.3f} {since}")
    lines.append(f"  by phase     {phases}")
    sources = ", ".join(f"{count} {name}" for name, count in recovery.sources.items())
    lines.append(f"resumed from   the state after iteration {recovery.version}; state of the seats from: {sources}")
    lines.append(f"moved          {recovery.nbytes / 1e6:.2f} MB from other nodes' replicas")
    interrupted = "; none was interrupted" if planned else ", and the interrupted one"
    lines.append(f"replayed       {recovery.steps_replayed} completed steps{interrupted}")
    if recovery.redundancy_s is not None:
        lines.append(
            f"protected      again {recovery.redundancy_s:.3f} s after {'that began' if planned else 'the failure'}"
        )
    return lines
