"""What agents, and workers and replicators through them, tell the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.messages.job import NodeAddress
from deadpool_ext.protocol.types import ShardSpec, SlotInfo, Version, WorkerState


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """First message of an agent. ``workers``: warm workers it can seat. ``address``: its replicator."""

    node: str
    pid: int
    workers: int
    address: NodeAddress
    process: str = ""  # random, of this agent process: a node may come back after it was lost, a process may not


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReady:
    """All of the node's warm workers are up (imports done, connected to the agent)."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaving:
    """The node leaves the job by its own will, at once: its user stopped it."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A thread of a worker waits for others in an operation of a group."""

    group: str
    ranks: tuple[int, ...]  # members of the group
    operation: str  # "allreduce", "recv", ...
    number: int  # of a collective, among the collectives of its group and generation, from 1; point-to-point: 0
    peers: tuple[int, ...]  # members that it needs: for point-to-point one, else all others
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Vital:
    """What a look from outside showed of one worker. It costs the worker nothing and works without its GIL."""

    rank: int
    generation: int  # of its groups
    iteration: int  # the 1-based one being computed; 0: none yet
    place: str  # where its main thread is: "setup", "data", "forward", ..., the phases of fault specs
    place_s: float  # seconds since it came there
    moves: int  # places entered and operations begun and ended: it changes if and only if something goes on
    process: str  # state of the process: a letter of /proc/PID/stat, "T" stopped
    waits: tuple[Wait, ...] = ()
    queued: tuple[Wait, ...] = ()  # on a device (NCCL): the last collective begun in each group; it may be over
    issued: dict[str, int] = field(default_factory=dict)  # collectives begun in this generation, by group
    busy_s: float = 0.0  # of the last finished iteration: seconds in which it did not wait for others


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Sent by the agent's own event loop at ``options['heartbeat_s']``, with a look at each of its workers."""

    node: str
    vitals: tuple[Vital, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """The answer to Inspect: Python frames of the worker's main thread, innermost first, or why there are none."""

    node: str
    rank: int
    number: int
    stack: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSeated:
    """A worker took a seat: identity of the process, for 'the survivors never restart'."""

    rank: int
    generation: int
    pid: int
    start_ticks: int  # field 22 of /proc/PID/stat


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecDeclared:
    """A worker at ``train()`` entry (set-up over) in generation 0, or a newcomer whose spec must match."""

    generation: int
    spec: ShardSpec
    facts: dict[str, Any] = field(default_factory=dict)  # what a newcomer of this seat must know to construct alone


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreReady:
    """The worker chosen as store host listens with a fresh rendezvous store for this generation."""

    generation: int
    rank: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveFailed:
    """A worker left a collective with an error although no newer generation was announced to it."""

    generation: int
    rank: int
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExited:
    """A worker process ended. ``script_error``: the last line of the training script's own exception, else empty."""

    rank: int
    generation: int
    status: int  # exit code, or minus the signal number
    script_error: str = ""
    cause: str = (
        ""  # of a script_error: "script", "device", "memory", "connection"; of a kill: "memory" where the kernel did it
    )
    iteration: int | None = None  # the 1-based iteration that was being computed, where known


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceDone:
    """All live workers of the node rejected further operations and aborted those in flight."""

    node: str
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceAck:
    """All live workers unwound, slots frozen; the node's inventory of sealed slots."""

    node: str
    generation: int
    workers: tuple[WorkerState, ...]
    own: tuple[SlotInfo, ...]
    hosted: tuple[SlotInfo, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Constructed:
    """A newcomer finished upstream's set-up alone. ``solo_ops``: collectives its solo backends answered."""

    generation: int
    rank: int
    solo_ops: int
    remote_ops: int  # operations issued on a real backend meanwhile; must be 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """A seat's state of the target version is sealed in its node's own arena."""

    generation: int
    rank: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchFailed:
    """The named copy could not be installed (checksum, version or connection); it must not be used again."""

    generation: int
    rank: int
    source_node: str
    detail: str
    corrupt: bool = True  # it does not match its checksum; else it could not be had


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotCorrupt:
    """A worker's own slot of this version is no good and void now, and it cannot make another one of it."""

    generation: int
    rank: int
    version: Version
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaMismatch:
    """Parameters of a data-parallel group differ, although they must not. Said by the group's first rank."""

    generation: int
    rank: int
    version: Version
    group: tuple[int, ...]
    digests: tuple[str, ...]  # of all parameters of the group, in group order
    deviating: tuple[int, ...]  # empty: undecided
    spoilt: tuple[int, ...]  # seats whose sealed copies of this version are wrong too
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """The worker's groups are connected in this generation."""

    generation: int
    rank: int
    groups: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """State, parameters, metadata and RNG are in place; the worker enters ``train()`` next."""

    generation: int
    rank: int
    nbytes: int
    params_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One finished iteration as the recording rank saw it: the fields of a line of ``steps.jsonl``."""

    generation: int
    rank: int
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A node's replicator saw this version committed world-wide in this generation."""

    generation: int
    node: str
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFinished:
    """The worker's ``train()`` returned and its final version is committed: digests for ``final.json``."""

    generation: int
    rank: int
    iteration: int
    digests: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One health check of a node. ``fatal``: a node that fails it should not train; else it is worth a warning."""

    check: str
    ok: bool
    fatal: bool = False
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """A node's answer to CheckHealth, or (number 0) what it found by itself."""

    node: str
    number: int
    findings: tuple[Finding, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseAck:
    """The answer to Pause, at once: the newest iteration whose end the main thread has passed. Below ``after``: it
    will stand still there."""

    generation: int
    rank: int
    after: int
    captured: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused:
    """The worker stands still between two iterations, outside of every operation."""

    generation: int
    rank: int
    iteration: int  # the one that is finished


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultReached:
    """A process stands at the point named by an armed fault and waits there to be hit from outside."""

    fault_id: int
    node: str
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Emit:
    """An event for ``events.jsonl``."""

    event: str
    generation: int
    node: str
    rank: int | None
    fields: dict[str, Any]
