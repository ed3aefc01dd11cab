"""Messages between workers, agents, replicators and the coordinator, as frozen values.

The wire (``deadpool_ext.control.wire``) encodes them by class name; nothing here knows how. Directions are named in
the section comments. Every message that belongs to a generation carries it, and a receiver drops older ones (INV-4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.types import Layout, RecoveryPlan, ShardSpec, SlotInfo, Version, WorkerState


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What every node needs to know about the job; sent to an agent when it is admitted."""

    job_id: str
    argv: tuple[str, ...]  # script and its arguments
    cwd: str
    env: dict[str, str]  # variables set in every worker on top of the node's own
    layout: Layout
    faults: tuple[dict[str, Any], ...] = ()  # parsed fault specs, each with an "id"
    options: dict[str, float] = field(default_factory=dict)  # deadlines in seconds, by name
    policy: dict[str, Any] = field(default_factory=dict)  # what the script's --deadpool-* arguments ask for, by name
    log_dir: str = ""  # logs/NODE/RANK.log below it; empty: inherit stdout


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAddress:
    """Where a node's replicator listens."""

    node: str
    host: str
    port: int


# ---- agent -> coordinator ------------------------------------------------------------------------------------------


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
    cause: str = ""  # of a script_error: "script", "device" or "memory"; of a kill: "memory" where the kernel did it
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


# ---- coordinator -> agent ------------------------------------------------------------------------------------------


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


# ---- agent -> worker (the agent also forwards Fence, Recover, HostStore, Rendezvous, Finish) ------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeSeat:
    """Tells a warm worker who it is. Environment, argv and log file come from the job."""

    rank: int
    local_rank: int
    generation: int
    solo: bool
    job: JobSpec
    board_path: str  # the node's board (shared words: fence, commit)
    pulse_path: str = ""  # where this worker shows how it is (deadpool_ext.comm.pulse)
    stack_path: str = ""  # where it writes its stack when asked to (deadpool_ext.control.stacks)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaReady:
    """The rank's own arena segment exists (path below /proc/AGENT_PID/fd)."""

    generation: int
    rank: int
    segment_path: str


# ---- worker -> agent (besides those that the agent passes on) -------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHello:
    """First message of a warm worker on the agent's socket."""

    pid: int
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFenced:
    """The worker's shells reject operations of older generations and those in flight were aborted."""

    generation: int
    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerUnwound:
    """The main thread is back in the resilient loop and holds no operation of an older generation."""

    generation: int
    state: WorkerState
    detail: str


# ---- operator (launcher, CLI) <-> coordinator -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorHello:
    """A launcher that can strike nodes from outside (those whose process trees it owns) and shows progress."""

    name: str
    nodes: tuple[str, ...] = ()  # whose process trees it owns


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRequest:
    """A person, or a script, asks something of the running job. ``command``: inject, swap, drain."""

    request: str  # chosen by who asks; the answers carry it
    command: str
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorAnswer:
    """The answer to an OperatorRequest, in one line. Not ``final``: accepted, and another one follows."""

    request: str
    ok: bool
    final: bool
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """Coordinator -> operator, or agent (which passes it on to the ranks that do it themselves): do this now."""

    fault: dict[str, Any]
    node: str
    rank: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Struck:
    """The answer: done, at this monotonic time (of the machine that did it) in seconds."""

    fault: dict[str, Any]
    node: str
    rank: int | None
    mono: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AddFault:
    """Coordinator -> agent -> workers: one more fault of the job, given while it runs."""

    fault: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOver:
    """Coordinator -> agent -> workers: whoever stands at this fault goes on, if he still can."""

    fault_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Coordinator -> operator: an event or a step, as written to the run directory."""

    kind: str  # "event" | "step"
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnded:
    """Coordinator -> operator: exit code and reason; the coordinator exits next."""

    code: int
    reason: str
