"""The coordinator machine's state, and the small things that all its handlers do with it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.classify import History, Limits
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.effects import Effect, Log, Send
from deadpool_ext.protocol.health import HealthBook
from deadpool_ext.protocol.membership import Membership
from deadpool_ext.protocol.messages import Assign, OperatorAnswer, Replicate
from deadpool_ext.protocol.moves import Move
from deadpool_ext.protocol.plan import BadCopy
from deadpool_ext.protocol.records import Failure, SeatBook, StepLedger
from deadpool_ext.protocol.recovery import Recovery
from deadpool_ext.protocol.ring import ReplicaMap
from deadpool_ext.protocol.strikes import Seating, Strikes
from deadpool_ext.protocol.timers import Timers
from deadpool_ext.protocol.types import NodeId, Rank, ShardSpec
from deadpool_ext.protocol.vitals import Vitals


class State(enum.StrEnum):
    """Where the job is in its life."""

    FORMING = "forming"  # nodes arrive and warm up
    STARTING = "starting"  # first construction, until the initial version is committed
    RUNNING = "running"
    FENCING = "fencing"  # a new generation: survivors unwind and report what they hold
    RECOVERING = "recovering"  # newcomers construct, replicas are fetched, a store opens
    RESUMING = "resuming"  # groups connect, state is restored
    FINISHING = "finishing"  # every rank is at the end of the script, workers exit
    STOPPED = "stopped"


@dataclass(slots=True, kw_only=True)
class Job:
    """All mutable state of one coordinator. ``out`` collects the effects of the event being handled."""

    config: CoordinatorConfig
    members: Membership
    replica_map: ReplicaMap
    strikes: Strikes
    state: State = State.FORMING
    generation: int = 0
    reason: str = ""  # why it stopped
    launched: set[NodeId] = field(default_factory=set)  # whose process trees a connected launcher owns
    departed: set[NodeId] = field(default_factory=set)  # left while forming, not back yet
    specs: dict[Rank, ShardSpec] = field(default_factory=dict)
    facts: dict[Rank, dict[str, Any]] = field(default_factory=dict)  # by seat, for newcomers to construct alone
    store_opened: bool = False  # generation 0's rendezvous went out
    began_at: int = 0  # version that the present generation began with: the iteration after it is everybody's first
    initial_commits: set[NodeId] = field(default_factory=set)
    seated_in: dict[Rank, int] = field(default_factory=dict)  # generation whose Assign made the seat's process
    exited: set[Rank] = field(default_factory=set)  # processes that ended with status 0
    script_error: str = ""  # in set-up, while its grace runs: the first one that is not an echo of another
    script_error_is_echo: bool = False
    suspicion: tuple[float, str] | None = None  # (since, what) a collective failed
    recovery: Recovery | None = None
    getting_warm: dict[NodeId, OperatorAnswer] = field(default_factory=dict)  # to be told when it is, by node
    planned: Move | None = None
    swaps: int = 0  # planned ones that were carried out
    degraded: bool = False
    bad_copies: set[BadCopy] = field(default_factory=set)
    history: History = field(default_factory=History)
    health: HealthBook = field(default_factory=HealthBook)
    vitals: Vitals = field(default_factory=Vitals)
    committed: dict[NodeId, int] = field(default_factory=dict)  # newest version that a node saw committed
    fruitless: int = 0  # generations without a new step since the last one that made some
    failures: list[dict[str, Any]] = field(default_factory=list)
    recoveries: int = 0
    replayed_steps: int = 0
    ledger: StepLedger = field(default_factory=StepLedger)
    seats: SeatBook = field(default_factory=SeatBook)
    timers: Timers = field(default_factory=Timers)
    out: list[Effect] = field(default_factory=list)

    def log(self, event: str, *, node: NodeId | None = None, rank: Rank | None = None, **fields: Any) -> None:
        """Record an event of the current generation."""
        self.out.append(Log(event=event, generation=self.generation, fields=fields, node=node, rank=rank))

    def send(self, nodes: Iterable[NodeId], message: Any) -> None:
        """Send ``message`` to each node that is a member."""
        self.out.extend(Send(node=node, message=message) for node in nodes if node in self.members.members)

    def assign(self, node: NodeId, ranks: tuple[Rank, ...], now: float, *, solo: bool) -> None:
        """Have ``node`` seat workers in this generation. A node that is not warm yet gets it when it is."""
        for rank in ranks:
            self.seated_in[rank] = self.generation
            self.exited.discard(rank)
            self.seats.finished.pop(rank, None)
            self.vitals.forget(rank)
        member = self.members.members[node]
        if not member.ready:
            self.timers.start(f"warm:{node}", now + self.config.deadlines.spare_wait_s)
            return
        member.assigned = True
        facts = tuple(self.facts.get(rank, {}) for rank in ranks) if solo else ()
        self.send([node], Assign(generation=self.generation, seats=ranks, solo=solo, facts=facts))
        if solo:
            self.timers.start(f"construct:{node}", now + self.config.deadlines.construct_s)

    def replicate(self) -> Replicate:
        """The replication map of the current generation; needs every spec."""
        return Replicate(
            generation=self.generation,
            specs=tuple(self.specs[rank] for rank in range(self.config.job.layout.world_size)),
            seat_nodes=tuple(self.members.seat_nodes),
            replica_of=self.replica_map,
            addresses=self.members.addresses(),
        )

    @property
    def limits(self) -> Limits:
        """When transients on one node are too many."""
        asked = self.config.job.policy.get("transient_limit", self.config.transient_limit)
        return Limits(transients=int(asked), window_s=self.config.transient_window_s)

    def seating(self) -> Seating:
        """What a fault needs to know of who sits where."""
        return Seating(seat_nodes=self.members.seat_nodes, spares=self.members.spares, replica_of=self.replica_map)

    def note_failure(self, failure: Failure) -> None:
        """Log a failure and what was concluded, and keep it for ``final.json``."""
        verdict = "permanent" if failure.permanent else "transient"
        self.log(
            "failure_detected",
            node=failure.node,
            rank=failure.rank,
            kind=failure.kind,
            reason=failure.reason,
            detected_mono=failure.detected_at,
        )
        fields: dict[str, Any] = {"class": verdict, "reason": failure.reason, "evidence": failure.evidence}
        self.log("failure_classified", node=failure.node, rank=failure.rank, kind=failure.kind, **fields)
        self.failures.append(
            {
                "generation": self.generation,
                "kind": failure.kind,
                "node": failure.node,
                "rank": failure.rank,
                "class": verdict,
                "reason": failure.reason,
                "iteration": self.ledger.highest if self.ledger.highest >= 0 else None,
            }
        )

    def status(self) -> dict[str, Any]:
        """Content of ``status.json``."""
        return {
            "job_id": self.config.job.job_id,
            "state": self.state.value,
            "reason": self.reason,
            "generation": self.generation,
            "iteration": self.ledger.highest if self.ledger.highest >= 0 else None,
            "degraded": self.degraded,
            "failures": len(self.failures),
            "recoveries": self.recoveries,
            "nodes": {
                node: {
                    "role": "active" if node in self.members.seat_nodes else "spare",
                    "ready": self.members.members[node].ready,
                    "seats": list(self.members.seats_of(node)),
                    **self.vitals.shown_nodes.get(node, {}),
                }
                for node in self.members.in_order()
            },
            "lost": dict(self.members.gone),
            "ranks": self.vitals.shown_ranks,
        }
