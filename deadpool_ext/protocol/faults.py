"""Fault specs: what to break, where and when (``kill-node:node=n2,step=5,phase=backward``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deadpool_ext.protocol.types import NodeId, Rank, UsageError

KINDS: tuple[str, ...] = (
    "kill-rank",
    "exit-rank",
    "raise-rank",
    "stop-rank",
    "kill-node",
    "stop-node",
    "partition-node",
    "heal-node",
    "slow-node",
    "kill-agent",
    "stop-agent",
    "kill-replicator",
    "kill-coordinator",
    "kill-spare",
    "corrupt-replica",
    "corrupt-slot",
    "drop-connection",
    "fill-disk",
    "sticky-device-error",
    "hold-gil",
)
AVAILABLE: tuple[str, ...] = ("kill-node", "drop-connection")
#: Carried out from outside by whoever owns the process trees; the others by the worker that reaches them.
STRUCK: frozenset[str] = frozenset({"kill-node"})
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
KEYS: tuple[str, ...] = ("rank", "node", "step", "phase", "after")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """One fault. It happens when the named place reaches ``step`` and ``phase``, or ``after_s`` seconds into the run.

    ``node`` is a name. ``id`` is unique within the job (the position on the command line).
    """

    id: int
    kind: str
    node: NodeId | None = None
    rank: Rank | None = None
    step: int | None = None  # the iteration during which it happens, counted from 1
    phase: str | None = None
    after_s: float | None = None

    @property
    def timed(self) -> bool:
        """True: struck ``after_s`` seconds into the run; False: armed in the workers, by step and phase."""
        return self.after_s is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values with the keys id, kind, node, rank, step, phase, after_s (None where not given)."""
        return {
            "id": self.id,
            "kind": self.kind,
            "node": self.node,
            "rank": self.rank,
            "step": self.step,
            "phase": self.phase,
            "after_s": self.after_s,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FaultSpec:
        """Inverse of :meth:`to_dict`; raises UsageError for keys it does not know."""
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise UsageError(f"fault {dict(values)!r}: unknown keys {', '.join(unknown)}")
        return cls(**values)


def parse_fault(text: str, fault_id: int = 0, node_names: Sequence[NodeId] | None = None) -> FaultSpec:
    """Parse one spec. Raises UsageError, one line that names what is allowed.

    ``node=`` takes a name or an index. ``node_names``: the job's nodes by index; without it, index 2 is ``n2`` and
    names are not checked.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind not in KINDS:
        raise UsageError(f"fault {text!r}: unknown kind {kind!r}; kinds: {' '.join(KINDS)}")
    if kind not in AVAILABLE:
        raise UsageError(f"fault {text!r}: {kind} is not available yet; available: {' '.join(AVAILABLE)}")
    given = _pairs(text, rest if colon else "")
    if kind == "kill-node" and "rank" in given:
        raise UsageError(f"fault {text!r}: kill-node takes node=, not rank=")
    if kind == "kill-node" and "node" not in given:
        raise UsageError(f"fault {text!r}: kill-node needs node=NAME or node=INDEX")
    if kind == "drop-connection" and not given.keys() & {"node", "rank"}:
        raise UsageError(
            f"fault {text!r}: drop-connection needs rank=R, or node=NAME for the node's first worker there"
        )
    timed = "after" in given
    if timed and kind not in STRUCK:
        raise UsageError(f"fault {text!r}: {kind} takes step=K with phase=, not after=")
    if timed and ("step" in given or "phase" in given):
        raise UsageError(f"fault {text!r}: after= and step=/phase= contradict each other; give one or the other")
    if not timed and "step" not in given:
        raise UsageError(f"fault {text!r}: say when: step=K with phase={'|'.join(PHASES)}, or after=SECONDS")
    phase = given.get("phase", None if timed else "forward")
    if phase is not None and phase not in PHASES:
        raise UsageError(f"fault {text!r}: unknown phase {phase!r}; phases: {' '.join(PHASES)}")
    return FaultSpec(
        id=fault_id,
        kind=kind,
        node=_node(text, given["node"], node_names) if "node" in given else None,
        rank=_whole(text, "rank", given["rank"], least=0) if "rank" in given else None,
        step=_whole(text, "step", given["step"], least=1) if "step" in given else None,
        phase=phase,
        after_s=_seconds(text, given["after"]) if timed else None,
    )


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


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise UsageError(f"fault {text!r}: after={value} must be a number of seconds, 0 or more")
    return seconds
