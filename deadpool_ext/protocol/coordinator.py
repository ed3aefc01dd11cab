"""The coordinator of one job as a pure machine: events and the time in, effects out.

The life of the job is :data:`TABLE` (what each message does in each state) and :data:`DEADLINES` (what happens when
a deadline passes). A pair that is not in the table has no effect. Everything that may arrive at any time (admission,
losses, faults, records) is in :meth:`Coordinator.handle`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deadpool_ext.protocol import (
    checking,
    ending,
    failing,
    forming,
    hanging,
    integrity,
    operating,
    planned,
    restoring,
    stragglers,
)
from deadpool_ext.protocol import messages as m
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.effects import (
    Effect,
    Event,
    FromNode,
    FromOperator,
    Log,
    NodeLost,
    Refuse,
    SendOperators,
    Tick,
    WriteStatus,
)
from deadpool_ext.protocol.fault_kinds import FAULT_KINDS, Hand
from deadpool_ext.protocol.faults import FaultSpec
from deadpool_ext.protocol.membership import Membership
from deadpool_ext.protocol.ring import Unprotected, replica_map
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.strikes import Strikes
from deadpool_ext.protocol.types import NodeId, UsageError

Handler = Callable[[Job, NodeId, Any, float], None]
DeadlineHandler = Callable[[Job, str, float], None]

# Message x state -> handler. What is not here has no effect.
TABLE: dict[tuple[State, type], Handler] = {
    (State.STARTING, m.StoreReady): forming.on_store_starting,
    (State.STARTING, m.SpecDeclared): forming.on_spec_starting,
    (State.STARTING, m.Committed): forming.on_committed_starting,
    (State.STARTING, m.TrainingFinished): restoring.on_finished,
    (State.STARTING, m.CollectiveFailed): forming.on_collective_starting,
    (State.STARTING, m.WorkerExited): forming.on_exit_starting,
    (State.STARTING, m.SlotCorrupt): integrity.on_slot_corrupt_starting,
    (State.RUNNING, m.Committed): restoring.on_committed,
    (State.RUNNING, m.TrainingFinished): restoring.on_finished,
    (State.RUNNING, m.CollectiveFailed): failing.on_collective_failed,
    (State.RUNNING, m.WorkerExited): failing.on_exit,
    (State.RUNNING, m.SlotCorrupt): integrity.on_slot_corrupt,
    (State.RUNNING, m.PauseAck): planned.on_pause_ack,
    (State.RUNNING, m.Paused): planned.on_paused,
    (State.RUNNING, m.ReplicaMismatch): integrity.on_mismatch,
    (State.FENCING, m.FenceDone): restoring.on_fence_done,
    (State.FENCING, m.FenceAck): restoring.on_fence_ack,
    (State.FENCING, m.SpecDeclared): restoring.on_spec,
    (State.FENCING, m.Constructed): restoring.on_constructed,
    (State.FENCING, m.WorkerExited): failing.on_exit,
    (State.RECOVERING, m.SpecDeclared): restoring.on_spec,
    (State.RECOVERING, m.Constructed): restoring.on_constructed,
    (State.RECOVERING, m.StoreReady): restoring.on_store,
    (State.RECOVERING, m.Fetched): restoring.on_fetched,
    (State.RECOVERING, m.FetchFailed): failing.on_fetch_failed,
    (State.RECOVERING, m.Committed): restoring.on_committed,
    (State.RECOVERING, m.WorkerExited): failing.on_exit,
    (State.RESUMING, m.Rebuilt): restoring.on_rebuilt,
    (State.RESUMING, m.Restored): restoring.on_restored,
    (State.RESUMING, m.Committed): restoring.on_committed,
    (State.RESUMING, m.TrainingFinished): restoring.on_finished,
    (State.RESUMING, m.CollectiveFailed): failing.on_collective_failed,
    (State.RESUMING, m.WorkerExited): failing.on_exit,
    (State.RESUMING, m.SlotCorrupt): integrity.on_slot_corrupt,
    (State.RESUMING, m.ReplicaMismatch): integrity.on_mismatch,
    (State.FINISHING, m.Committed): restoring.on_committed,
    (State.FINISHING, m.WorkerExited): ending.on_exit_at_end,
}

# Deadline kind -> handler; the name's part after a colon is the handler's second argument.
DEADLINES: dict[str, DeadlineHandler] = {
    "join": forming.on_join_over,
    "spare_wait": forming.on_spare_wait_over,
    "setup": forming.on_setup_over,
    "grace": failing.on_grace_over,
    "fence": failing.on_fence_over,
    "construct": failing.on_construct_over,
    "warm": failing.on_warm_over,
    "store": restoring.on_store_over,
    "fetch": restoring.on_fetch_over,
    "rebuild": restoring.on_rebuild_over,
    "restore": restoring.on_restore_over,
    "redundancy": restoring.on_redundancy_over,
    "stall": restoring.on_stall_over,
    "prepare": planned.on_prepare_over,
    "pause": planned.on_pause_over,
    "finish": ending.on_finish_over,
    "exit": ending.on_exit_over,
}


class Coordinator:
    """The machine. Not thread-safe: one caller, events in the order of arrival, time never going back.

    Raises UsageError at construction where the layout cannot be protected (unless ``config.allow_unprotected``).
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        peers = replica_map(config.job.layout, config.seat_domains or None, config.replicas)
        if isinstance(peers, Unprotected):
            if not config.allow_unprotected:
                raise UsageError(peers.reason)
            peers = peers.partial
        # Agents go by the same deadlines.
        options = {**config.job.options, **config.deadlines.to_options()}
        config = replace(config, job=replace(config.job, options=options))
        self.job = Job(
            config=config,
            members=Membership(config.job.layout),
            replica_map=peers,
            strikes=Strikes(FaultSpec.from_dict(values) for values in config.job.faults),
        )
        self._last: float | None = None
        self._status: dict[str, Any] = {}

    @property
    def state(self) -> State:
        """Where the job is in its life."""
        return self.job.state

    @property
    def wake_at(self) -> float | None:
        """Monotonic seconds at which a Tick is needed at the latest (ticks may come earlier); None when stopped."""
        if self.job.state is State.STOPPED:
            return None
        silences = self.job.members.silences(self.job.config.deadlines)
        return min([at for at in (self.job.timers.earliest, *silences) if at is not None], default=None)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about ``event`` at monotonic time ``now`` (seconds), in order."""
        job = self.job
        if self._stopped():
            return self._after_the_end(event)
        self._notice_time(now)
        match event:
            case FromNode():
                self._from_node(event, now)
            case FromOperator():
                self._from_operator(event.message, now)
            case NodeLost():
                if event.node in job.members.members:
                    failing.lose(job, [event.node], event.reason, now, evidence="connection")
            case Tick():
                self._tick(now)
        if not self._stopped() and job.status() != self._status:
            self._status = job.status()
            job.out.append(WriteStatus(content=self._status))
        effects, job.out = job.out, []
        return effects

    def _stopped(self) -> bool:
        return self.job.state is State.STOPPED

    def _after_the_end(self, event: Event) -> list[Effect]:
        if isinstance(event, FromNode) and isinstance(event.message, m.Hello):
            return [Refuse(node=event.node, connection=event.connection, reason="the job is over")]
        return []

    def _notice_time(self, now: float) -> None:
        """Start the clock; forgive the time in which this process itself did not run (stopped, starved)."""
        if self._last is None:
            self.job.timers.start("join", now + self.job.config.deadlines.join_s)
            self._last = now
        gap = now - self._last
        if gap > self.job.config.deadlines.node_timeout_s / 2:
            self.job.members.shift(gap)
            self.job.timers.shift(gap)
            self.job.vitals.shift(gap)
            self.job.log("warning", reason=f"the coordinator did not run for {gap:.1f} s; deadlines are moved")
        self._last = max(self._last, now)

    def _from_node(self, event: FromNode, now: float) -> None:
        job, node, message = self.job, event.node, event.message
        if isinstance(message, m.Hello):
            forming.on_hello(job, message, event.connection, now)
            return
        member = job.members.members.get(node)
        if member is None:  # lost or given up: whatever it still says has no effect (INV-4)
            return
        member.heard(now, job.config.deadlines)
        match message:
            case m.Heartbeat():
                hanging.on_heartbeat(job, node, message, now)
                return
            case m.Inspected():
                hanging.on_inspected(job, node, message)
                return
            case m.Emit() if planned.is_released(job, node) and message.fields.get("kind") == "stale":
                return  # its replicator still talks to peers that went on, until it hears that it has no seats
            case m.Emit():
                job.out.append(
                    Log(
                        event=message.event,
                        generation=message.generation,
                        fields=message.fields,
                        node=message.node,
                        rank=message.rank,
                    )
                )
                return
            case m.Leaving():
                failing.lose(job, [node], message.reason, now, evidence="left")
                return
            case m.HealthReport():
                checking.on_report(job, node, message, now)
                return
            case m.NodeReady():
                self._ready(node, message, now)
                return
            case m.FaultReached():
                self._fault_reached(node, message, now)
                return
            case m.Struck():
                self._struck(message)
                return
        if planned.on_newcomer(job, node, message, now) or not self._current(node, message):
            return
        if isinstance(message, m.WorkerSeated):
            job.seats.seated(node, message)
            return
        if isinstance(message, m.StepDone):
            restoring.on_step(job, message, now)
            stragglers.look(job, now)
            return
        handler = TABLE.get((job.state, type(message)))
        if handler is not None:
            handler(job, node, message, now)
            if job.state is State.RUNNING and isinstance(message, m.Committed):
                restoring.settle(job, now)

    def _current(self, node: NodeId, message: Any) -> bool:
        """False for messages of an older generation, of a seat that the node does not fill, or of a dead process."""
        job = self.job
        rank = message.spec.rank if isinstance(message, m.SpecDeclared) else getattr(message, "rank", None)
        if rank is None:
            if node not in job.members.seat_nodes:
                return False
        elif not 0 <= rank < len(job.members.seat_nodes) or job.members.seat_nodes[rank] != node:
            return False
        if isinstance(message, m.StepDone):
            return bool(message.generation <= job.generation)
        if isinstance(message, m.WorkerSeated | m.WorkerExited) and rank is not None:
            # These speak of a process, which lives through generations: compare with the one that seated it.
            return bool(job.seated_in.get(rank, 0) <= message.generation <= job.generation)
        if message.generation > job.generation:
            job.log("warning", node=node, reason=f"{type(message).__name__} of future generation {message.generation}")
        return bool(message.generation == job.generation)

    def _ready(self, node: NodeId, message: m.NodeReady, now: float) -> None:
        job = self.job
        if job.state is State.FORMING:
            forming.on_ready_forming(job, node, message, now)
        elif node in job.members.seat_nodes:
            restoring.on_ready_active(job, node, message, now)
        else:
            forming.on_ready_later(job, node, message, now)
        planned.on_warm(job, node)

    def _from_operator(self, message: Any, now: float) -> None:
        job = self.job
        match message:
            case m.OperatorHello():
                job.launched.update(message.nodes)
            case m.OperatorRequest():
                self._strike(operating.on_request(job, message, now))
            case m.Struck():
                self._struck(message)

    def _struck(self, message: m.Struck) -> None:
        job = self.job
        if not job.strikes.struck(message):
            return
        job.out.append(
            Log(
                event="fault_injected",
                generation=job.generation,
                fields={"fault": message.fault},
                node=message.node,
                rank=message.rank,
                mono=message.mono,
            )
        )
        recovery = job.recovery
        if recovery is not None and not recovery.done:
            # The loss overtook the word of what caused it: the failure began then.
            for failure in recovery.failures:
                at = job.strikes.claim(failure.node, failure.rank)
                recovery.failed_at = min(recovery.failed_at, recovery.failed_at if at is None else at)
        # Whoever stands at it and was not hit goes on.
        job.send(job.members.active, m.FaultOver(fault_id=int(message.fault["id"])))

    def _fault_reached(self, node: NodeId, message: m.FaultReached, now: float) -> None:
        faults = self.job.strikes
        if faults.is_used_up(message.fault_id):  # a process that was forked again stands where it happened before
            self.job.send([node], m.FaultOver(fault_id=message.fault_id))
            return
        due = faults.reached(message, self.job.seating())
        if due is None:
            return
        group, strikes = due
        name = f"group:{group}"
        if strikes:
            self.job.timers.cancel(name)
            self._strike(strikes)
        elif not self.job.timers.running(name):
            self.job.timers.start(name, now + self.job.config.deadlines.fault_group_s)

    def _strike(self, strikes: list[m.Strike]) -> None:
        for strike in strikes:
            hand = FAULT_KINDS[strike.fault["kind"]].hand
            if hand is Hand.LAUNCHER and strike.node in self.job.launched:
                self.job.out.append(SendOperators(message=strike))
            else:
                self.job.send([strike.node], strike)

    def _tick(self, now: float) -> None:
        job = self.job
        silent = job.members.silent(now, job.config.deadlines)
        if silent:
            timeout = min(silent.values())
            failing.lose(job, list(silent), f"no sign of life for {timeout:g} s", now, evidence="silence")
        while (name := job.timers.pop_due(now)) is not None:
            kind, _, subject = name.partition(":")
            if kind == "fault":
                self._strike(job.strikes.timed_due(int(subject), job.seating()))
            elif kind == "group":
                self._strike(job.strikes.group_due(subject, job.seating()))
            elif kind == "grace" and job.state is State.STARTING:
                forming.on_grace_starting(job, subject, now)
            else:
                DEADLINES[kind](job, subject, now)
        hanging.look(job, now)
