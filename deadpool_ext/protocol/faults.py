"""Fault specs: what to break, where and when (``kill-node:node=n2,step=5,phase=backward``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deadpool_ext.protocol.fault_kinds import AVAILABLE as AVAILABLE
from deadpool_ext.protocol.fault_kinds import FAULT_KINDS, FaultKind, Hand, Target
from deadpool_ext.protocol.fault_kinds import KINDS as KINDS
from deadpool_ext.protocol.types import NodeId, Rank, UsageError

PHASES: tuple[str, ...] = (
    "data",
    "forward",
    "backward",
    "grad_sync",
    "optimizer",
    "d2h",
    "h2h",
    "gate",
    "post_step",
    "eval",
    "save",
    "recovery",
)
KEYS: tuple[str, ...] = ("rank", "node", "step", "phase", "after", "seconds", "times")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """One fault. It happens when the named place reaches ``step`` and ``phase``, ``after_s`` seconds into the run, or
    at once where neither is given (on a live run).

    ``node`` is a name. ``id`` is unique within the job (the position on the command line).
    """

    id: int
    kind: str
    node: NodeId | None = None
    rank: Rank | None = None
    step: int | None = None  # the iteration during which it happens, counted from 1
    phase: str | None = None
    after_s: float | None = None
    seconds: float | None = None  # how long it lasts, for kinds that last
    times: int = 1  # it happens again when its place is reached again, so many times in all

    @property
    def timed(self) -> bool:
        """True: struck ``after_s`` seconds into the run; False: armed in the workers, by step and phase."""
        return self.step is None

    @property
    def text(self) -> str:
        """As it may be given on the command line; what is the kind's default is left out."""
        values: dict[str, object] = {name: getattr(self, name) for name in ("node", "rank", "step", "phase")}
        if self.after_s:
            values["after"] = f"{self.after_s:g}"
        if self.seconds != self.about.seconds:
            values["seconds"] = f"{self.seconds:g}"
        if self.times != 1:
            values["times"] = self.times
        pairs = ",".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{self.kind}:{pairs}" if pairs else self.kind

    @property
    def about(self) -> FaultKind:
        """What kind of fault it is."""
        return FAULT_KINDS[self.kind]

    def is_at(self, node: NodeId, rank: Rank) -> bool:
        """Whether this rank on this node is where the fault's step and phase are watched for.

        What has no rank of its own (a spare) is watched for by rank 0.
        """
        if self.about.target is Target.SPARE or (self.node is None and self.rank is None):
            return rank == 0
        return self.node in (None, node) and self.rank in (None, rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain values with the fields' names as keys (None where not given)."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FaultSpec:
        """Inverse of :meth:`to_dict`; raises UsageError for keys it does not know."""
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise UsageError(f"fault {dict(values)!r}: unknown keys {', '.join(unknown)}")
        return cls(**values)


def parse_fault(
    text: str, fault_id: int = 0, node_names: Sequence[NodeId] | None = None, *, live: bool = False
) -> FaultSpec:
    """Parse one spec. Raises UsageError, one line that names what is allowed.

    ``node=`` takes a name or an index. ``node_names``: the job's nodes by index; without it, index 2 is ``n2`` and
    names are not checked. ``live``: for a running job, where a spec that names no time means now.
    """
    kind, colon, rest = text.strip().partition(":")
    about = FAULT_KINDS.get(kind)
    if about is None:
        raise UsageError(f"fault {text!r}: unknown kind {kind!r}; kinds: {' '.join(AVAILABLE)}")
    if not about.available:
        raise UsageError(f"fault {text!r}: {kind} is not available yet; available: {' '.join(AVAILABLE)}")
    given = _pairs(text, rest if colon else "")
    _check_place(text, about, given)
    timed = "after" in given or (live and "step" not in given)
    if "after" in given and ("step" in given or "phase" in given):
        raise UsageError(f"fault {text!r}: after= and step=/phase= contradict each other; give one or the other")
    if not timed and "step" not in given:
        raise UsageError(f"fault {text!r}: say when: step=K with phase={'|'.join(PHASES)}, or after=SECONDS")
    if timed and "phase" in given:
        raise UsageError(f"fault {text!r}: phase= needs step=")
    phase = given.get("phase", None if timed else "forward")
    if phase is not None and phase not in PHASES:
        raise UsageError(f"fault {text!r}: unknown phase {phase!r}; phases: {' '.join(PHASES)}")
    if "seconds" in given and about.seconds is None:
        raise UsageError(f"fault {text!r}: {kind} does not last, so it takes no seconds=")
    if "times" in given and (timed or about.hand is not Hand.WORKER):
        raise UsageError(f"fault {text!r}: times= goes with step= and a fault that a rank does to itself")
    return FaultSpec(
        id=fault_id,
        kind=kind,
        node=_node(text, given["node"], node_names) if "node" in given else None,
        rank=_whole(text, "rank", given["rank"], least=0) if "rank" in given else None,
        step=_whole(text, "step", given["step"], least=1) if "step" in given else None,
        phase=phase,
        after_s=_seconds(text, "after", given.get("after", "0")) if timed else None,
        seconds=_seconds(text, "seconds", given["seconds"]) if "seconds" in given else about.seconds,
        times=_whole(text, "times", given.get("times", "1"), least=1),
    )


def _check_place(text: str, about: FaultKind, given: Mapping[str, str]) -> None:
    """What is hit must be said, and only that."""
    kind = about.name
    if about.target is Target.NODE:
        if "rank" in given:
            raise UsageError(f"fault {text!r}: {kind} takes node=, not rank=")
        if "node" not in given:
            raise UsageError(f"fault {text!r}: {kind} needs node=NAME or node=INDEX")
    elif about.target is Target.SPARE and "rank" in given:
        raise UsageError(f"fault {text!r}: {kind} takes node= (or nothing: the first spare), not rank=")
    elif about.target is Target.RANK and not given.keys() & {"node", "rank"}:
        raise UsageError(f"fault {text!r}: {kind} needs rank=R, or node=NAME for the node's first worker there")


def parse_faults(texts: Sequence[str], node_names: Sequence[NodeId] | None = None) -> tuple[FaultSpec, ...]:
    """Parse several specs; ids are positions. Raises UsageError, also for two identical faults."""
    faults = tuple(parse_fault(text, number, node_names) for number, text in enumerate(texts))
    seen: dict[tuple[Any, ...], str] = {}
    for fault, text in zip(faults, texts, strict=True):
        key = tuple(value for name, value in fault.to_dict().items() if name != "id")
        if key in seen:
            raise UsageError(f"fault {text!r} is given twice")
        seen[key] = text
    return faults


def _pairs(text: str, rest: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in KEYS:
            raise UsageError(f"fault {text!r}: unknown key {key!r}; keys: {' '.join(f'{name}=' for name in KEYS)}")
        if not equals or not value:
            raise UsageError(f"fault {text!r}: {key}= needs a value")
        if key in given:
            raise UsageError(f"fault {text!r}: {key}= is given twice")
        given[key] = value
    return given


def _node(text: str, value: str, node_names: Sequence[NodeId] | None) -> NodeId:
    if node_names is None:
        return f"n{int(value)}" if value.isdecimal() else value
    if value in node_names:
        return value
    if value.isdecimal() and int(value) < len(node_names):
        return node_names[int(value)]
    raise UsageError(
        f"fault {text!r}: no node {value!r}; nodes: {' '.join(node_names)}, or an index below {len(node_names)}"
    )


def _whole(text: str, key: str, value: str, *, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise UsageError(f"fault {text!r}: {key}={value} must be a whole number of at least {least}")
    return int(value)


def _seconds(text: str, key: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise UsageError(f"fault {text!r}: {key}={value} must be a number of seconds, 0 or more")
    return seconds
