"""Events that go into the agent machine and effects that come out of it, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deadpool_ext.protocol.messages import NodeAddress, Replicate, Strike
from deadpool_ext.protocol.types import Rank, ShardSpec, Version, WorkerState

# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FromCoordinator:
    """A message of the coordinator."""

    message: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJoined:
    """A forked worker connected and is warm."""

    token: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FromWorker:
    """A message of a worker."""

    token: str
    message: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnded:
    """A worker's process ended and all it had sent was delivered. ``status``: exit code, or minus the signal."""

    token: str
    status: int
    cause: str = ""  # "memory": the kernel killed it because the node ran out of it


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatorFrozen:
    """The replicator touches no slot any more until it is configured for this generation or a newer one."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatorEnded:
    """The replicator's process was reaped, and all it had said was delivered: it touches no slot any more."""

    status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatFetched:
    """A seat's state of the target version is sealed in this node's own segment."""

    generation: int
    rank: Rank
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatFetchFailed:
    """The copy of a seat's state could not be installed. ``corrupt``: it does not match its checksum."""

    generation: int
    rank: Rank
    source_node: str
    detail: str
    corrupt: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionCommitted:
    """The replicator saw a version committed world-wide."""

    generation: int
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    FromCoordinator
    | WorkerJoined
    | FromWorker
    | WorkerEnded
    | ReplicatorFrozen
    | ReplicatorEnded
    | SeatFetched
    | SeatFetchFailed
    | VersionCommitted
    | Tick
)

# ---- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ToCoordinator:
    """Send a message to the coordinator."""

    message: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ToWorker:
    """Send a message to a worker; drop it silently if the connection is gone."""

    token: str
    message: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkWorkers:
    """Have the fork server make one worker per token."""

    tokens: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KillWorker:
    """SIGKILL a worker and everything below it; what comes next finds it dead. WorkerEnded follows."""

    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectWorker:
    """Read the worker's stack and answer Inspected."""

    token: str
    rank: Rank
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceBoard:
    """Write the newest generation to the node's board."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReplicator:
    """Have the fork server make a replicator. ``after_death``: give back what its predecessor left half-written."""

    after_death: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezeReplicator:
    """Stop all reads and writes of slots; ReplicatorFrozen follows."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EnsureSegments:
    """Create missing segments; drop hosted ones that are not named here."""

    own: tuple[ShardSpec, ...]
    hosted: tuple[ShardSpec, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VoidAbove:
    """Void every slot above the version of a recovery, and empty those left half-written."""

    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class DropSegments:
    """Give all segments back: the node has no seats and hosts nothing. The replicator is frozen, workers are dead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigureReplicator:
    """Replicate by this map from now on."""

    replicate: Replicate


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSeat:
    """Fetch a seat's state into its own segment; SeatFetched or SeatFetchFailed follows."""

    generation: int
    rank: Rank
    version: Version
    source: NodeAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnounceArena:
    """Send ArenaReady with the segment's path to the worker of this rank."""

    token: str
    generation: int
    rank: Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class SendFenceAck:
    """Read the inventory of sealed slots and send FenceAck."""

    generation: int
    workers: tuple[WorkerState, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHealthChecks:
    """Run the node's health checks beside everything else; a HealthReport of this number goes to the coordinator."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CarryOut:
    """Carry out a fault on this node: it hits a process of it, or its memory. ``token``: the rank's worker, if any."""

    strike: Strike
    token: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AddReplicatorFault:
    """The replicator's streams watch for one more fault."""

    fault: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseReplicator:
    """The replicator's stream that stands at this fault goes on."""

    fault_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """End every process of the node and exit with ``code``."""

    code: int
    reason: str


Effect = (
    ToCoordinator
    | ToWorker
    | ForkWorkers
    | KillWorker
    | InspectWorker
    | FenceBoard
    | StartReplicator
    | FreezeReplicator
    | EnsureSegments
    | VoidAbove
    | DropSegments
    | ConfigureReplicator
    | FetchSeat
    | AnnounceArena
    | SendFenceAck
    | RunHealthChecks
    | CarryOut
    | AddReplicatorFault
    | ReleaseReplicator
    | Leave
)
