"""What became of each fault: read from a run's events, put together over a campaign. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One fault: what was decided, and what it cost. ``seconds`` by phase with ``total``; empty: no recovery."""

    kind: str
    fault: Mapping[str, Any]
    decided: str  # transient | permanent | script | none
    evidence: str
    seconds: Mapping[str, float]
    step_s: float  # the run's median step without a failure
    steps_replayed: int

    @property
    def total(self) -> float | None:
        """Seconds from the injection to the end of the first new step."""
        return self.seconds.get("total")

    @property
    def beyond_a_step(self) -> float | None:
        """``total`` without the step that is computed in it anyway."""
        return None if self.total is None else self.total - self.step_s


def outcomes(events: Sequence[Event], steps: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """The faults of one run in the order in which they happened.

    A failure belongs to the last fault before its detection, a recovery to the fault whose failure it is the first
    after.
    """
    injected = sorted(
        (event for event in events if event["event"] == "fault_injected"), key=lambda event: event["mono"]
    )
    starts = [float(event["mono"]) for event in injected]

    def owner(mono: float) -> int:
        return max((index for index, start in enumerate(starts) if start <= mono), default=0)

    decided: dict[int, Event] = {}
    detected: dict[int, float] = {}
    recovered: dict[int, Event] = {}
    last_detected = 0.0
    for event in events:
        if event["event"] == "failure_detected":
            last_detected = float(event.get("detected_mono", event["mono"]))
        elif event["event"] == "failure_classified" and injected:
            index = owner(last_detected)
            decided.setdefault(index, event)
            detected.setdefault(index, last_detected)
        elif event["event"] == "recovery_done" and detected:
            recovered.setdefault(max(detected, key=lambda index: detected[index]), event)
    calm = [float(step["step_seconds"]) for step in steps if step.get("step_seconds")]
    step_s = statistics.median(calm) if calm else 0.0
    found = []
    for index, event in enumerate(injected):
        verdict, recovery = decided.get(index), recovered.get(index)
        found.append(
            Outcome(
                kind=str(event["fault"]["kind"]),
                fault=event["fault"],
                decided=str(verdict["class"]) if verdict else "none",
                evidence=str(verdict["evidence"]) if verdict else "",
                seconds=dict(recovery["seconds"]) if recovery else {},
                step_s=step_s,
                steps_replayed=int(recovery["steps_replayed"]) if recovery else 0,
            )
        )
    return found


def confusion(found: Iterable[Outcome]) -> dict[str, Counter[str]]:
    """Injected kind -> how often each class was decided."""
    matrix: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in found:
        matrix[outcome.kind][outcome.decided] += 1
    return dict(matrix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Recoveries of one kind, in seconds."""

    count: int
    detect: float  # median
    median: float
    worst: float
    beyond_median: float  # without a median step
    beyond_worst: float


def costs(found: Iterable[Outcome]) -> dict[str, Cost]:
    """Injected kind -> what its recoveries cost; kinds without one are left out."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in found:
        if outcome.total is not None:
            groups[outcome.kind].append(outcome)
    return {
        kind: Cost(
            count=len(group),
            detect=statistics.median(outcome.seconds.get("detect", 0.0) for outcome in group),
            median=statistics.median(outcome.total or 0.0 for outcome in group),
            worst=max(outcome.total or 0.0 for outcome in group),
            beyond_median=statistics.median(outcome.beyond_a_step or 0.0 for outcome in group),
            beyond_worst=max(outcome.beyond_a_step or 0.0 for outcome in group),
        )
        for kind, group in sorted(groups.items())
    }
