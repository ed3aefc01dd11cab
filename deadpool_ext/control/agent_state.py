"""The agent's decisions as a pure machine: ``handle(event, now) -> effects``; no I/O, no clock.

It seats warm workers, passes messages between them and the coordinator, and answers a fence once every live worker
has unwound and the replicator is frozen. Messages of generations that are over have no effect (INV-4).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Final

from deadpool_ext.control.agent_events import (
    AddReplicatorFault,
    AnnounceArena,
    CarryOut,
    ConfigureReplicator,
    DropSegments,
    Effect,
    EnsureSegments,
    Event,
    FenceBoard,
    FetchSeat,
    ForkWorkers,
    FreezeReplicator,
    FromCoordinator,
    FromWorker,
    InspectWorker,
    KillWorker,
    Leave,
    ReleaseReplicator,
    ReplicatorEnded,
    ReplicatorFrozen,
    RunHealthChecks,
    SeatFetched,
    SeatFetchFailed,
    SendFenceAck,
    StartReplicator,
    Tick,
    ToCoordinator,
    ToWorker,
    VersionCommitted,
    VoidAbove,
    WorkerEnded,
    WorkerJoined,
)
from deadpool_ext.control.agent_replicator import ReplicatorRecord
from deadpool_ext.control.agent_workers import OpenSeat, WorkerRecord
from deadpool_ext.protocol.fault_kinds import FAULT_KINDS, Hand
from deadpool_ext.protocol.messages import (
    AddFault,
    Assign,
    CheckHealth,
    Committed,
    Emit,
    FaultOver,
    Fence,
    FenceDone,
    Fetched,
    FetchFailed,
    Finish,
    HostStore,
    Inspect,
    Inspected,
    JobSpec,
    NodeReady,
    Pause,
    Recover,
    Refused,
    Rendezvous,
    Replicate,
    Shutdown,
    StandDown,
    Strike,
    TakeSeat,
    Welcome,
    WorkerExited,
    WorkerFenced,
    WorkerSeated,
    WorkerUnwound,
)
from deadpool_ext.protocol.types import NodeId, Rank, SourceKind, invariant

EXIT_REFUSED: Final = 2
EXIT_BROKEN: Final = 70
WARM_DEATH_LIMIT: Final = 8
UNWIND_SHARE: Final = 0.6  # of fence_s: what has not unwound by then is killed, in time to still acknowledge
_DEFAULT_FENCE_S: Final = 20.0


class AgentState:
    """The machine of one node."""

    def __init__(self, node: NodeId, workers: int, board_path: str) -> None:
        self.node = node
        self.generation = 0
        self.fence: Fence | None = None
        self.job: JobSpec | None = None
        self._target = workers
        self._board_path = board_path
        self._tokens = (f"{node}-w{number}" for number in itertools.count())
        self._workers: dict[str, WorkerRecord] = {}
        self._open: dict[Rank, OpenSeat] = {}
        self._ready_sent = False
        self._ever_seated = False
        self._warm_deaths = 0
        self._replicator = ReplicatorRecord()
        self._frozen = -1
        self._fence_done = -1
        self._fence_acked = -1
        self._kill_at = float("inf")
        self._leaving = False

    def start(self) -> list[Effect]:
        """Fork the replicator and the first warm workers."""
        return [StartReplicator(), *self._fork(self._target)]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about ``event``, in order. ``now``: monotonic seconds."""
        if self._leaving:
            return []
        match event:
            case FromCoordinator():
                return self._from_coordinator(event.message, now)
            case WorkerJoined():
                return self._joined(event)
            case FromWorker():
                return self._from_worker(event.token, event.message)
            case WorkerEnded():
                return self._ended(event)
            case ReplicatorFrozen():
                self._frozen = max(self._frozen, event.generation)
                return self._fence_progress()
            case ReplicatorEnded():
                return self._replicator_ended(event, now)
            case SeatFetched():
                return self._report_fetch(event)
            case SeatFetchFailed():
                return self._report_fetch_failure(event)
            case VersionCommitted():
                committed = Committed(generation=event.generation, node=self.node, version=event.version)
                return [ToCoordinator(message=committed)]
            case Tick():
                return self._tick(now)

    # ---- coordinator -----------------------------------------------------------------------------------------------

    def _from_coordinator(self, message: Any, now: float) -> list[Effect]:
        match message:
            case Welcome():
                self.job = message.job
                return [RunHealthChecks(number=0), *self._readiness()]
            case Refused():
                return self._leave(EXIT_REFUSED, f"the coordinator refuses this node: {message.reason}")
            case Shutdown():
                return self._leave(message.code, message.reason)
            case Assign():
                return self._assign(message)
            case Replicate():
                return self._replicate(message) if message.generation == self.generation else []
            case Fence():
                return self._on_fence(message, now)
            case StandDown():
                return self._stand_down(message)
            case Recover():
                return self._recover(message) if message.plan.generation == self.generation else []
            case HostStore():
                return self._to_seat(message.rank, message) if message.generation == self.generation else []
            case CheckHealth():
                return [RunHealthChecks(number=message.number)]
            case Inspect():
                return self._inspect(message)
            case Strike():
                return self._strike(message)
            case AddFault():
                return self._add_fault(message)
            case FaultOver():
                over = [ToWorker(token=worker.token, message=message) for worker in self._seated()]
                return [*over, ReleaseReplicator(fault_id=message.fault_id)]
            case Rendezvous() | Finish() | Pause():
                return self._to_seats(message) if message.generation == self.generation else []
        return [self._warning(f"a message the agent does not know: {type(message).__name__}")]

    def _add_fault(self, message: AddFault) -> list[Effect]:
        """Remembered for workers to come, and told to those that are here."""
        if self.job is not None:
            self.job = replace(self.job, faults=(*self.job.faults, message.fault))
        told = [ToWorker(token=worker.token, message=message) for worker in self._seated()]
        return [*told, AddReplicatorFault(fault=message.fault)]

    def _inspect(self, inspect: Inspect) -> list[Effect]:
        holder = self._holder(inspect.rank)
        if holder is not None:
            return [InspectWorker(token=holder.token, rank=inspect.rank, number=inspect.number)]
        problem = f"node {self.node} has no process of this rank"
        answer = Inspected(node=self.node, rank=inspect.rank, number=inspect.number, stack=(), problem=problem)
        return [ToCoordinator(message=answer)]

    def _strike(self, strike: Strike) -> list[Effect]:
        """A fault: ranks that do it themselves are told, all of them where none is named; the rest is done here."""
        holder = self._holder(strike.rank) if strike.rank is not None else None
        if FAULT_KINDS[strike.fault["kind"]].hand is not Hand.WORKER:
            return [CarryOut(strike=strike, token=holder.token if holder is not None else None)]
        hit = self._seated() if strike.rank is None else [holder] if holder is not None else []
        return [ToWorker(token=worker.token, message=strike) for worker in hit]

    def _assign(self, assign: Assign) -> list[Effect]:
        if assign.generation < self.generation:
            return []
        effects: list[Effect] = []
        if assign.generation > self.generation or not self._ever_seated:
            # A spare sees no Fence of the generation that it enters in.
            effects.append(FenceBoard(generation=assign.generation))
        self.generation = assign.generation
        self._ever_seated = True
        for index, rank in enumerate(assign.seats):
            if (holder := self._holder(rank)) is not None:  # it hangs, and must not write to its slots any more
                holder.condemned = True
                holder.rank = None
                effects.append(KillWorker(token=holder.token))
            facts = assign.facts[index] if index < len(assign.facts) else {}
            self._open[rank] = OpenSeat(assign=assign, facts=facts)
        # A fence need not wait for who was killed here.
        return effects + self._fill_seats() + self._fence_progress()

    def _stand_down(self, order: StandDown) -> list[Effect]:
        """The seats are elsewhere: end this node's workers and be a spare, with memory and processes as at the start.

        What its old workers still say has no effect: they are condemned.
        """
        if order.generation < self.generation:
            return []
        self.generation = order.generation
        self.fence, self._kill_at = None, float("inf")
        self._open.clear()
        self._ready_sent = self._ever_seated = False
        self._warm_deaths = 0
        self._replicator.unconfigured()
        effects: list[Effect] = [FenceBoard(generation=order.generation)]
        for worker in self._seated():
            worker.condemned, worker.rank = True, None
            effects.append(KillWorker(token=worker.token))
        effects += [FreezeReplicator(generation=order.generation), DropSegments()]
        warm = sum(1 for worker in self._workers.values() if worker.warm)
        return [*effects, *self._fork(self._target - warm), *self._readiness()]

    def _fill_seats(self) -> list[Effect]:
        effects: list[Effect] = []
        warm = [worker for worker in self._workers.values() if worker.warm and worker.connected]
        for rank in sorted(self._open):
            if not warm:
                break
            effects += self._take_seat(warm.pop(0), rank, self._open.pop(rank))
        coming = sum(1 for worker in self._workers.values() if worker.warm and not worker.connected)
        return effects + self._fork(len(self._open) - coming)

    def _take_seat(self, worker: WorkerRecord, rank: Rank, seat: OpenSeat) -> list[Effect]:
        job = self.job
        invariant(job is not None, f"node {self.node} was given seats before it was admitted")
        assert job is not None
        worker.rank, worker.generation = rank, seat.assign.generation
        take = TakeSeat(
            rank=rank,
            local_rank=rank % job.layout.ranks_per_node,
            generation=seat.assign.generation,
            solo=seat.assign.solo,
            job=job,
            board_path=self._board_path,
            facts=seat.facts,
        )
        seated = WorkerSeated(
            rank=rank, generation=seat.assign.generation, pid=worker.pid, start_ticks=worker.start_ticks
        )
        effects: list[Effect] = [ToWorker(token=worker.token, message=take), ToCoordinator(message=seated)]
        for item in seat.backlog:
            if isinstance(item, AnnounceArena):
                effects.append(AnnounceArena(token=worker.token, generation=item.generation, rank=rank))
            else:
                effects.append(ToWorker(token=worker.token, message=item))
        return effects

    def _replicate(self, replicate: Replicate) -> list[Effect]:
        own = self._own_seats(replicate)
        hosted = {
            rank
            for rank, peers in enumerate(replicate.replica_of)
            if any(replicate.seat_nodes[peer] == self.node for peer in peers)
        }
        specs = {spec.rank: spec for spec in replicate.specs}
        self._replicator.configured(replicate)
        effects: list[Effect] = [
            EnsureSegments(
                own=tuple(specs[rank] for rank in own), hosted=tuple(specs[rank] for rank in sorted(hosted))
            ),
            ConfigureReplicator(replicate=replicate),
        ]
        for rank in own:
            effects += self._announce(rank, replicate.generation)
        return effects

    def _own_seats(self, replicate: Replicate) -> list[Rank]:
        return [rank for rank, node in enumerate(replicate.seat_nodes) if node == self.node]

    def _announce(self, rank: Rank, generation: int) -> list[Effect]:
        if (holder := self._holder(rank)) is not None:
            return [AnnounceArena(token=holder.token, generation=generation, rank=rank)]
        if (seat := self._open.get(rank)) is not None:
            seat.backlog.append(AnnounceArena(token="", generation=generation, rank=rank))
        return []

    def _recover(self, recover: Recover) -> list[Effect]:
        plan = recover.plan
        addresses = {address.node: address for address in recover.replicate.addresses}
        effects: list[Effect] = [VoidAbove(version=plan.target), *self._replicate(recover.replicate)]
        for seat in plan.seats:
            if seat.node == self.node and seat.source is SourceKind.REPLICA:
                source = addresses.get(seat.source_node or "")
                invariant(source is not None, f"the plan's source {seat.source_node} has no address")
                assert source is not None
                fetch = FetchSeat(generation=plan.generation, rank=seat.rank, version=plan.target, source=source)
                self._replicator.fetching(fetch)
                effects.append(fetch)
        return effects + self._to_seats(recover)

    def _to_seat(self, rank: Rank, message: Any) -> list[Effect]:
        if (holder := self._holder(rank)) is not None:
            return [ToWorker(token=holder.token, message=message)]
        if (seat := self._open.get(rank)) is not None:
            seat.backlog.append(message)
        return []

    def _to_seats(self, message: Any) -> list[Effect]:
        ranks = sorted({*self._open, *(worker.rank for worker in self._seated() if worker.rank is not None)})
        return [effect for rank in ranks for effect in self._to_seat(rank, message)]

    # ---- fence -----------------------------------------------------------------------------------------------------

    def _on_fence(self, fence: Fence, now: float) -> list[Effect]:
        if fence.generation < self.generation or (self.fence and fence.generation <= self.fence.generation):
            return []  # INV-4
        self.fence = fence
        self.generation = fence.generation
        for rank in [rank for rank, seat in self._open.items() if seat.assign.generation < fence.generation]:
            del self._open[rank]  # its worker never existed: the coordinator assigns it again
        fence_s = self.job.options.get("fence_s", _DEFAULT_FENCE_S) if self.job else _DEFAULT_FENCE_S
        self._kill_at = now + UNWIND_SHARE * fence_s
        effects: list[Effect] = [
            FenceBoard(generation=fence.generation),
            FreezeReplicator(generation=fence.generation),
        ]
        effects += [ToWorker(token=worker.token, message=fence) for worker in self._fencing()]
        return effects + self._fence_progress()

    def _fencing(self) -> list[WorkerRecord]:
        """Live workers that took their seat before the fence."""
        fence = self.fence
        return [worker for worker in self._seated() if fence and worker.generation < fence.generation]

    def _fence_progress(self) -> list[Effect]:
        fence = self.fence
        if fence is None or fence.generation < self.generation:
            return []
        generation = fence.generation
        workers = self._fencing()
        effects: list[Effect] = []
        if self._fence_done < generation and all(worker.fenced >= generation for worker in workers):
            self._fence_done = generation
            effects.append(ToCoordinator(message=FenceDone(node=self.node, generation=generation)))
        unwound = all(worker.unwound >= generation for worker in workers)
        if self._fence_acked < generation <= min(self._fence_done, self._frozen) and unwound:
            self._fence_acked = generation
            self._kill_at = float("inf")
            states = tuple(worker.state for worker in workers if worker.state is not None)
            effects.append(SendFenceAck(generation=generation, workers=states))
        return effects

    def _tick(self, now: float) -> list[Effect]:
        if now < self._kill_at:
            return []
        self._kill_at = float("inf")
        fence = self.fence
        effects: list[Effect] = []
        for worker in self._fencing():
            if fence is not None and min(worker.fenced, worker.unwound) < fence.generation:
                effects.append(self._warning(f"rank {worker.rank} did not unwind and is killed", rank=worker.rank))
                effects.append(KillWorker(token=worker.token))
        return effects

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _fork(self, count: int) -> list[Effect]:
        if count <= 0:
            return []
        tokens = tuple(next(self._tokens) for _ in range(count))
        self._workers |= {token: WorkerRecord(token=token) for token in tokens}
        return [ForkWorkers(tokens=tokens)]

    def _joined(self, event: WorkerJoined) -> list[Effect]:
        worker = self._workers.get(event.token)
        if worker is None or worker.connected:
            return []
        worker.pid, worker.start_ticks, worker.connected = event.pid, event.start_ticks, True
        return self._readiness() + (self._fill_seats() if self._open else [])

    def _readiness(self) -> list[Effect]:
        warm = sum(1 for worker in self._workers.values() if worker.warm and worker.connected)
        if self._ready_sent or self.job is None or warm < self._target:
            return []
        self._ready_sent = True
        return [ToCoordinator(message=NodeReady(node=self.node))]

    def _from_worker(self, token: str, message: Any) -> list[Effect]:
        worker = self._workers.get(token)
        if worker is None or worker.rank is None:
            return []
        match message:
            case WorkerExited():
                worker.last_words = message
                return []
            case WorkerFenced():
                worker.fenced = max(worker.fenced, message.generation)
                return self._fence_progress()
            case WorkerUnwound():
                if message.generation >= worker.unwound:
                    worker.unwound, worker.state = message.generation, message.state
                return self._fence_progress()
        return [ToCoordinator(message=message)]

    def _ended(self, event: WorkerEnded) -> list[Effect]:
        worker = self._workers.pop(event.token, None)
        if worker is None or worker.condemned:
            return []
        if worker.rank is None:
            return self._warm_ended(event.status)
        said = worker.last_words
        exited = WorkerExited(
            rank=worker.rank,
            generation=self.generation,
            status=event.status,
            script_error=said.script_error if said is not None else "",
            cause=said.cause if said is not None else event.cause,
            iteration=said.iteration if said is not None else None,
        )
        return [ToCoordinator(message=exited), *self._fence_progress()]

    def _warm_ended(self, status: int) -> list[Effect]:
        self._warm_deaths += 1
        if self._warm_deaths > WARM_DEATH_LIMIT:
            return self._leave(EXIT_BROKEN, f"workers of node {self.node} die before they have a seat ({status})")
        warm = sum(1 for worker in self._workers.values() if worker.warm)
        return self._fork((len(self._open) if self._ever_seated else self._target) - warm)

    def seats(self) -> list[tuple[str, Rank]]:
        """Workers that have a seat, by token, with their ranks."""
        return [(worker.token, worker.rank) for worker in self._seated() if worker.rank is not None]

    def first_rank(self) -> Rank:
        """The lowest seat of this node; 0 if it has none."""
        return min((worker.rank for worker in self._seated() if worker.rank is not None), default=0)

    def _seated(self) -> list[WorkerRecord]:
        return [worker for worker in self._workers.values() if worker.rank is not None and not worker.condemned]

    def _holder(self, rank: Rank) -> WorkerRecord | None:
        return next((worker for worker in self._seated() if worker.rank == rank), None)

    # ---- replicator ------------------------------------------------------------------------------------------------

    def _replicator_ended(self, event: ReplicatorEnded, now: float) -> list[Effect]:
        fence = self.fence
        fenced = fence is not None and fence.generation == self.generation
        effects = self._replicator.ended(self.generation, fenced=fenced, now=now)
        how = f"the replicator of node {self.node} ended with status {event.status}"
        if effects is None:
            return self._leave(EXIT_BROKEN, f"{how}, for the {self._replicator.deaths}th time in a short while")
        fields = {"kind": "replicator_restarted", "reason": how, "deaths": self._replicator.deaths}
        return [*effects, self._emit("warning", fields)]

    def _report_fetch(self, event: SeatFetched) -> list[Effect]:
        self._replicator.answered(event)
        if event.generation != self.generation:
            return []
        fetched = Fetched(generation=event.generation, rank=event.rank, nbytes=event.nbytes, seconds=event.seconds)
        return [ToCoordinator(message=fetched)]

    def _report_fetch_failure(self, event: SeatFetchFailed) -> list[Effect]:
        self._replicator.answered(event)
        if event.generation != self.generation:
            return []
        failed = FetchFailed(
            generation=event.generation,
            rank=event.rank,
            source_node=event.source_node,
            detail=event.detail,
            corrupt=event.corrupt,
        )
        return [ToCoordinator(message=failed)]

    def _leave(self, code: int, reason: str) -> list[Effect]:
        self._leaving = True
        return [Leave(code=code, reason=reason)]

    def _warning(self, text: str, rank: Rank | None = None) -> ToCoordinator:
        return self._emit("warning", {"text": text}, rank)

    def _emit(self, event: str, fields: dict[str, Any], rank: Rank | None = None) -> ToCoordinator:
        return ToCoordinator(
            message=Emit(event=event, generation=self.generation, node=self.node, rank=rank, fields=fields)
        )
