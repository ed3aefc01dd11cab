"""What the coordinator tells agents; they pass Fence, Recover, HostStore, Rendezvous, Pause and Finish on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deadpool_ext.protocol.messages.job import JobSpec, NodeAddress
from deadpool_ext.protocol.types import RecoveryPlan, ShardSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """Admission: the job, and whether the node starts as a spare."""

    job: JobSpec
    spare: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Not admitted, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Seat warm workers. ``solo``: each constructs alone and waits for a plan; else all construct together."""

    generation: int
    seats: tuple[int, ...]
    solo: bool
    facts: tuple[dict[str, Any], ...] = ()  # as declared by the seats' first holders, in the order of seats (solo only)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicate:
    """Specs of all ranks, who sits where, who hosts whose replicas, and everybody's replicator: make arenas, start."""

    generation: int
    specs: tuple[ShardSpec, ...]
    seat_nodes: tuple[str, ...]  # index: rank
    replica_of: tuple[tuple[int, ...], ...]  # index: rank; the peer seats whose nodes host its replicas
    addresses: tuple[NodeAddress, ...]  # active nodes only


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """A new generation begins: reject, abort, unwind, freeze, report."""

    generation: int
    reason: str
    lost_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recover:
    """The plan, with the replication map of its generation. Slots above the target are voided first."""

    plan: RecoveryPlan
    replicate: Replicate


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckHealth:
    """Run the health checks now and answer HealthReport with the same number."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspect:
    """Read the Python stack of a worker's main thread from outside and answer Inspected with the same number."""

    rank: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStore:
    """The worker of ``rank`` opens a fresh rendezvous store for this generation and answers StoreReady."""

    generation: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Connect the groups of this generation through this store."""

    generation: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Every worker stands still after iteration ``after`` until a newer generation or another Pause. -1: go on."""

    generation: int
    after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StandDown:
    """The node has no seats any more: drop workers and memory, keep warm workers, say NodeReady again."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Every rank finished training: let the script go on to its end."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """The job is over for this node: end workers and exit with ``code``."""

    code: int
    reason: str
