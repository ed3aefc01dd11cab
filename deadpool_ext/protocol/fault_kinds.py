"""What can be broken on purpose: the kinds of faults, who carries each out, and what a spec of it must say."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Hand(enum.StrEnum):
    """Who carries a fault out."""

    LAUNCHER = "launcher"  # owns the process trees; where it does not (other machines), the node's agent does it
    AGENT = "agent"  # it hits a process or the memory of its node
    WORKER = "worker"  # the process does it to itself
    NOBODY = "nobody"  # not available yet


class Target(enum.StrEnum):
    """What a fault hits."""

    NODE = "node"
    RANK = "rank"
    SPARE = "spare"
    JOB = "job"


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """One kind. ``seconds``: default of the key ``seconds=``, None where the kind has no duration."""

    name: str
    hand: Hand
    target: Target
    what: str
    seconds: float | None = None

    @property
    def available(self) -> bool:
        """Whether it can be carried out by this version."""
        return self.hand is not Hand.NOBODY


_RANK, _NODE = Target.RANK, Target.NODE
_TABLE = (
    FaultKind(name="kill-rank", hand=Hand.AGENT, target=_RANK, what="SIGKILL to the rank's process"),
    FaultKind(name="exit-rank", hand=Hand.WORKER, target=_RANK, what="the process ends by itself, without a word"),
    FaultKind(name="raise-rank", hand=Hand.WORKER, target=_RANK, what="the training script raises an exception"),
    FaultKind(name="stop-rank", hand=Hand.AGENT, target=_RANK, what="SIGSTOP to the rank's process"),
    FaultKind(name="kill-node", hand=Hand.LAUNCHER, target=_NODE, what="SIGKILL to the node's whole process tree"),
    FaultKind(name="stop-node", hand=Hand.LAUNCHER, target=_NODE, what="SIGSTOP to the node's whole process tree"),
    FaultKind(name="partition-node", hand=Hand.NOBODY, target=_NODE, what="the node's network is cut"),
    FaultKind(name="heal-node", hand=Hand.NOBODY, target=_NODE, what="the node's network is back"),
    FaultKind(
        name="slow-node",
        hand=Hand.WORKER,
        target=_NODE,
        what="each step of the node's ranks takes seconds= longer from now on",
        seconds=0.5,
    ),
    FaultKind(name="kill-agent", hand=Hand.LAUNCHER, target=_NODE, what="SIGKILL to the node's agent alone"),
    FaultKind(name="stop-agent", hand=Hand.LAUNCHER, target=_NODE, what="SIGSTOP to the node's agent alone"),
    FaultKind(name="kill-replicator", hand=Hand.AGENT, target=_NODE, what="SIGKILL to the node's replicator"),
    FaultKind(name="kill-coordinator", hand=Hand.NOBODY, target=Target.JOB, what="SIGKILL to the coordinator"),
    FaultKind(name="kill-spare", hand=Hand.LAUNCHER, target=Target.SPARE, what="SIGKILL to a spare node's tree"),
    FaultKind(
        name="corrupt-replica", hand=Hand.AGENT, target=_RANK, what="one bit of the rank's newest stored replica flips"
    ),
    FaultKind(
        name="corrupt-slot", hand=Hand.AGENT, target=_RANK, what="one bit of the rank's own newest sealed slot flips"
    ),
    FaultKind(
        name="corrupt-param", hand=Hand.WORKER, target=_RANK, what="one bit of the rank's model parameters flips"
    ),
    FaultKind(
        name="corrupt-main",
        hand=Hand.WORKER,
        target=_RANK,
        what="one bit of the fp32 main parameters that the rank's optimizer keeps flips",
    ),
    FaultKind(
        name="drop-connection", hand=Hand.WORKER, target=_RANK, what="the rank's data connections break, nobody dies"
    ),
    FaultKind(name="fill-disk", hand=Hand.NOBODY, target=_NODE, what="the run directory's disk is full"),
    FaultKind(
        name="sticky-device-error",
        hand=Hand.WORKER,
        target=_RANK,
        what="every later device operation of the rank's process fails; with node=, of all its ranks",
    ),
    FaultKind(
        name="hold-gil",
        hand=Hand.WORKER,
        target=_RANK,
        what="native code holds the interpreter lock for seconds=",
        seconds=30.0,
    ),
    FaultKind(
        name="stuck-rank",
        hand=Hand.WORKER,
        target=_RANK,
        what="the main thread sleeps for seconds= and enters no collective",
        seconds=3600.0,
    ),
)

FAULT_KINDS: dict[str, FaultKind] = {kind.name: kind for kind in _TABLE}
KINDS: tuple[str, ...] = tuple(FAULT_KINDS)
AVAILABLE: tuple[str, ...] = tuple(name for name, kind in FAULT_KINDS.items() if kind.available)
