"""The agent machine: seats, fences, recoveries, ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deadpool_ext.control.agent_events import (
    AnnounceArena,
    ConfigureReplicator,
    DropSegments,
    Effect,
    EnsureSegments,
    FenceBoard,
    FetchSeat,
    ForkWorkers,
    FreezeReplicator,
    FromCoordinator,
    FromWorker,
    InspectWorker,
    KillWorker,
    Leave,
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
from deadpool_ext.control.agent_replicator import DEATH_LIMIT, DEATH_WINDOW_S
from deadpool_ext.control.agent_state import WARM_DEATH_LIMIT, AgentState
from deadpool_ext.protocol.messages import (
    Assign,
    Committed,
    Emit,
    Fence,
    FenceDone,
    Fetched,
    FetchFailed,
    HostStore,
    Inspect,
    JobSpec,
    NodeAddress,
    NodeReady,
    Recover,
    Refused,
    Rendezvous,
    Replicate,
    Shutdown,
    SpecDeclared,
    StandDown,
    TakeSeat,
    Welcome,
    WorkerExited,
    WorkerFenced,
    WorkerSeated,
    WorkerUnwound,
)
from deadpool_ext.protocol.types import RecoveryPlan, SeatPlan, ShardSpec, SourceKind, Version, WorkerState

NODES = ("n0", "n0", "n1", "n1")
RING = ((2,), (3,), (0,), (1,))


def spec(rank: int) -> ShardSpec:
    return ShardSpec(rank=rank, shard_bytes=8, meta_capacity=8, layout_digest="0" * 16)


def replicate(generation: int, nodes: tuple[str, ...] = NODES) -> Replicate:
    return Replicate(
        generation=generation,
        specs=tuple(spec(rank) for rank in range(4)),
        seat_nodes=nodes,
        replica_of=RING,
        addresses=tuple(NodeAddress(node=node, host="h", port=1) for node in dict.fromkeys(nodes)),
    )


def recover(generation: int, nodes: tuple[str, ...], new: str, source: str) -> Recover:
    seats = tuple(
        SeatPlan(
            rank=rank,
            node=node,
            new_worker=node == new,
            source=SourceKind.REPLICA if node == new else SourceKind.KEEP,
            source_node=source if node == new else None,
        )
        for rank, node in enumerate(nodes)
    )
    plan = RecoveryPlan(generation=generation, target=Version(v=5, lineage=0), seats=seats, reason="test")
    return Recover(plan=plan, replicate=replicate(generation, nodes))


class Driver:
    """Feeds a machine and remembers its effects."""

    def __init__(self, node: str, job: JobSpec) -> None:
        self.machine = AgentState(node, 2, "/board")
        self.job = job
        self.tokens: list[str] = []
        self.note(self.machine.start())

    def note(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, ForkWorkers):
                self.tokens += effect.tokens
        return effects

    def told(self, message: Any, now: float = 0.0) -> list[Effect]:
        return self.note(self.machine.handle(FromCoordinator(message=message), now))

    def join(self, token: str) -> list[Effect]:
        pid = 100 + self.tokens.index(token)
        return self.note(self.machine.handle(WorkerJoined(token=token, pid=pid, start_ticks=7), 0.0))

    def says(self, token: str, message: Any) -> list[Effect]:
        return self.note(self.machine.handle(FromWorker(token=token, message=message), 0.0))

    def event(self, event: Any, now: float = 0.0) -> list[Effect]:
        return self.note(self.machine.handle(event, now))

    def warm(self) -> Driver:
        self.told(Welcome(job=self.job, spare=False))
        for token in tuple(self.tokens):
            self.join(token)
        return self

    def seated(self) -> Driver:
        self.warm()
        self.told(Assign(generation=0, seats=(0, 1), solo=False))
        return self

    def unwind(self, token: str, rank: int, generation: int, live: int = 5) -> list[Effect]:
        effects = self.says(token, WorkerFenced(generation=generation, rank=rank, seconds=0.0))
        state = WorkerState(rank=rank, live=Version(v=live, lineage=0), dirty=False)
        return effects + self.says(token, WorkerUnwound(generation=generation, state=state, detail=""))


def sent(effects: list[Effect]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, ToCoordinator)]


def of(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


@pytest.fixture
def driver(make_job: Callable[..., JobSpec]) -> Driver:
    return Driver("n0", make_job(options={"fence_s": 10.0}))


def test_a_node_is_ready_when_admitted_and_all_workers_are_warm(driver: Driver) -> None:
    assert len(driver.tokens) == 2
    assert driver.join(driver.tokens[0]) == []
    assert driver.told(Welcome(job=driver.job, spare=True)) == [RunHealthChecks(number=0)]
    assert sent(driver.join(driver.tokens[1])) == [NodeReady(node="n0")]
    assert driver.join(driver.tokens[1]) == []


def test_seats_go_to_warm_workers_with_local_ranks(make_job: Callable[..., JobSpec]) -> None:
    driver = Driver("n1", make_job()).warm()
    effects = driver.told(Assign(generation=0, seats=(2, 3), solo=False))
    seats = [effect.message for effect in of(effects, ToWorker)]
    assert [(seat.rank, seat.local_rank, seat.solo, seat.board_path) for seat in seats] == [
        (2, 0, False, "/board"),
        (3, 1, False, "/board"),
    ]
    assert sent(effects) == [
        WorkerSeated(rank=2, generation=0, pid=100, start_ticks=7),
        WorkerSeated(rank=3, generation=0, pid=101, start_ticks=7),
    ]


def test_a_node_that_gave_its_seats_up_is_as_at_the_start(driver: Driver) -> None:
    driver.seated()
    effects = driver.told(StandDown(generation=1, reason="elsewhere"))
    assert len(of(effects, KillWorker)) == 2 and of(effects, DropSegments) == [DropSegments()]
    assert of(effects, FreezeReplicator) == [FreezeReplicator(generation=1)]
    (forked,) = of(effects, ForkWorkers)
    assert len(forked.tokens) == 2
    joined = [driver.join(token) for token in forked.tokens]
    assert sent(joined[0]) == [] and sent(joined[1]) == [NodeReady(node="n0")]
    # The old workers' ends are no news, and an older order has no effect.
    assert driver.told(StandDown(generation=0, reason="late")) == []
    assert of(driver.told(Assign(generation=2, seats=(0,), solo=True)), ToWorker)


def test_facts_reach_the_newcomer_of_their_seat(driver: Driver) -> None:
    driver.warm()
    effects = driver.told(Assign(generation=1, seats=(0, 1), solo=True, facts=({"a": 1}, {"b": 2})))
    assert [effect.message.facts for effect in of(effects, ToWorker)] == [{"a": 1}, {"b": 2}]
    assert of(effects, FenceBoard) == [FenceBoard(generation=1)]


def test_arenas_follow_the_map(driver: Driver) -> None:
    driver.seated()
    effects = driver.told(replicate(0))
    assert effects[0] == EnsureSegments(own=(spec(0), spec(1)), hosted=(spec(2), spec(3)))
    assert effects[1] == ConfigureReplicator(replicate=replicate(0))
    assert [(effect.token, effect.rank) for effect in of(effects, AnnounceArena)] == [
        (driver.tokens[0], 0),
        (driver.tokens[1], 1),
    ]


def test_messages_pass_in_both_directions(driver: Driver) -> None:
    driver.seated()
    declared = SpecDeclared(generation=0, spec=spec(0))
    assert sent(driver.says(driver.tokens[0], declared)) == [declared]
    store = HostStore(generation=0, rank=1)
    assert driver.told(store) == [ToWorker(token=driver.tokens[1], message=store)]
    assert len(driver.told(Rendezvous(generation=0, host="h", port=1))) == 2
    assert driver.told(Rendezvous(generation=-1, host="h", port=1)) == []  # INV-4


def test_a_fence_is_acknowledged_after_all_unwound_and_the_replicator_froze(driver: Driver) -> None:
    driver.seated()
    fence = Fence(generation=1, reason="n1 lost", lost_nodes=("n1",))
    effects = driver.told(fence)
    assert effects[:2] == [FenceBoard(generation=1), FreezeReplicator(generation=1)]
    assert [effect.message for effect in of(effects, ToWorker)] == [fence, fence]
    assert driver.unwind(driver.tokens[0], 0, 1) == []
    assert sent(driver.unwind(driver.tokens[1], 1, 1)) == [FenceDone(node="n0", generation=1)]
    (ack,) = driver.event(ReplicatorFrozen(generation=1))
    assert isinstance(ack, SendFenceAck) and [state.rank for state in ack.workers] == [0, 1]
    assert driver.event(ReplicatorFrozen(generation=1)) == []
    assert driver.told(fence) == []


def test_unwinding_before_being_fenced_is_in_order_too(driver: Driver) -> None:
    driver.seated()
    driver.told(Fence(generation=1, reason=""))
    driver.event(ReplicatorFrozen(generation=1))
    for rank, token in enumerate(driver.tokens):
        state = WorkerState(rank=rank, live=None, dirty=True)
        assert driver.says(token, WorkerUnwound(generation=1, state=state, detail="")) == []
    driver.says(driver.tokens[0], WorkerFenced(generation=1, rank=0, seconds=0.0))
    effects = driver.says(driver.tokens[1], WorkerFenced(generation=1, rank=1, seconds=0.0))
    assert sent(effects) == [FenceDone(node="n0", generation=1)] and of(effects, SendFenceAck)


def test_a_worker_that_dies_while_fenced_is_not_waited_for(driver: Driver) -> None:
    driver.seated()
    driver.told(Fence(generation=1, reason=""))
    driver.event(ReplicatorFrozen(generation=1))
    driver.unwind(driver.tokens[0], 0, 1)
    effects = driver.event(WorkerEnded(token=driver.tokens[1], status=-9))
    assert sent(effects) == [
        WorkerExited(rank=1, generation=1, status=-9),
        FenceDone(node="n0", generation=1),
    ]
    assert [state.rank for state in of(effects, SendFenceAck)[0].workers] == [0]


def test_a_worker_that_does_not_unwind_is_killed(driver: Driver) -> None:
    driver.seated()
    driver.told(Fence(generation=1, reason=""), now=100.0)
    driver.unwind(driver.tokens[0], 0, 1)
    assert driver.event(Tick(), now=105.9) == []
    effects = driver.event(Tick(), now=106.0)
    assert of(effects, KillWorker) == [KillWorker(token=driver.tokens[1])]
    assert isinstance(sent(effects)[0], Emit)
    assert of(driver.event(Tick(), now=200.0), KillWorker) == []


def test_a_newer_fence_supersedes_an_unfinished_one(driver: Driver) -> None:
    driver.seated()
    driver.told(Fence(generation=1, reason=""))
    driver.unwind(driver.tokens[0], 0, 1)
    driver.told(Fence(generation=2, reason=""))
    assert driver.unwind(driver.tokens[1], 1, 1) == []
    assert driver.told(Fence(generation=1, reason="")) == []
    driver.unwind(driver.tokens[0], 0, 2)
    driver.event(ReplicatorFrozen(generation=2))
    assert of(driver.unwind(driver.tokens[1], 1, 2), SendFenceAck)


def test_recovery_on_a_survivor_voids_configures_and_passes_the_plan_on(driver: Driver) -> None:
    driver.seated()
    driver.told(replicate(0))
    driver.told(Fence(generation=1, reason=""))
    message = recover(1, ("n0", "n0", "n2", "n2"), new="n2", source="n0")
    effects = driver.told(message)
    assert effects[0] == VoidAbove(version=Version(v=5, lineage=0))
    assert effects[1] == EnsureSegments(own=(spec(0), spec(1)), hosted=(spec(2), spec(3)))
    assert not of(effects, FetchSeat)
    assert [effect.message for effect in of(effects, ToWorker)] == [message, message]
    assert driver.told(recover(0, NODES, new="", source="")) == []  # INV-4


def test_a_spare_fetches_for_its_new_seats(make_job: Callable[..., JobSpec]) -> None:
    driver = Driver("n2", make_job()).warm()
    driver.told(Assign(generation=1, seats=(2, 3), solo=True))
    effects = driver.told(recover(1, ("n0", "n0", "n2", "n2"), new="n2", source="n0"))
    assert [(fetch.rank, fetch.version.v, fetch.source.node) for fetch in of(effects, FetchSeat)] == [
        (2, 5, "n0"),
        (3, 5, "n0"),
    ]
    kinds = [type(effect) for effect in effects]
    assert kinds.index(VoidAbove) < kinds.index(EnsureSegments) < kinds.index(FetchSeat)
    assert sent(driver.event(SeatFetched(generation=1, rank=2, nbytes=8, seconds=0.1))) == [
        Fetched(generation=1, rank=2, nbytes=8, seconds=0.1)
    ]
    failed = SeatFetchFailed(generation=1, rank=3, source_node="n0", detail="corrupt")
    assert sent(driver.event(failed)) == [FetchFailed(generation=1, rank=3, source_node="n0", detail="corrupt")]
    assert driver.event(SeatFetched(generation=0, rank=2, nbytes=8, seconds=0.1)) == []  # INV-4


def test_a_reforked_worker_gets_what_was_said_before_it_was_warm(driver: Driver) -> None:
    driver.seated()
    driver.told(replicate(0))
    driver.event(WorkerEnded(token=driver.tokens[1], status=-11))
    driver.told(Fence(generation=1, reason=""))
    effects = driver.told(Assign(generation=1, seats=(1,), solo=True))
    assert len(of(effects, ForkWorkers)[0].tokens) == 1
    plan = recover(1, NODES, new="", source="")
    driver.told(plan)
    store = HostStore(generation=1, rank=1)
    assert driver.told(store) == []
    effects = driver.join(driver.tokens[2])
    messages = [effect.message for effect in of(effects, ToWorker)]
    assert isinstance(messages[0], TakeSeat) and messages[1:] == [plan, store]
    assert [effect.token for effect in of(effects, AnnounceArena)] == [driver.tokens[2]]


def test_a_half_way_newcomer_is_replaced_when_its_seat_is_assigned_again(driver: Driver) -> None:
    driver.warm()
    driver.told(Assign(generation=1, seats=(0, 1), solo=True))
    effects = driver.told(Assign(generation=2, seats=(0, 1), solo=True))
    assert [effect.token for effect in of(effects, KillWorker)] == driver.tokens[:2]
    assert len(of(effects, ForkWorkers)[0].tokens) == 2
    assert driver.event(WorkerEnded(token=driver.tokens[0], status=-9)) == []


def test_a_worker_that_hangs_is_killed_before_anybody_else_gets_its_seat_and_no_fence_waits_for_it(
    driver: Driver,
) -> None:
    driver.seated()
    hung = driver.tokens[1]
    driver.told(Fence(generation=1, reason=""))
    driver.event(ReplicatorFrozen(generation=1))
    driver.unwind(driver.tokens[0], 0, 1)  # the other one answers before the agent hears who hangs
    effects = driver.told(Assign(generation=1, seats=(1,), solo=True))
    kinds = [type(effect) for effect in effects]
    assert effects[0] == KillWorker(token=hung)
    assert kinds.index(KillWorker) < kinds.index(ForkWorkers) < kinds.index(SendFenceAck)
    assert [state.rank for state in of(effects, SendFenceAck)[0].workers] == [0]
    assert driver.machine.seats() == [(driver.tokens[0], 0)]
    taken = driver.join(driver.tokens[-1])
    assert [effect.message.rank for effect in of(taken, ToWorker)] == [1]
    assert driver.event(WorkerEnded(token=hung, status=-9)) == []


def test_stacks_are_read_of_workers_that_are_here(driver: Driver) -> None:
    driver.seated()
    assert driver.told(Inspect(rank=1, number=5)) == [InspectWorker(token=driver.tokens[1], rank=1, number=5)]
    (answer,) = sent(driver.told(Inspect(rank=3, number=6)))
    assert (answer.number, answer.stack, answer.problem) == (6, (), "node n0 has no process of this rank")


def test_the_scripts_own_error_travels_with_its_end(driver: Driver) -> None:
    driver.seated()
    error = WorkerExited(rank=0, generation=0, status=1, script_error="ValueError: x")
    assert driver.says(driver.tokens[0], error) == []
    assert sent(driver.event(WorkerEnded(token=driver.tokens[0], status=1))) == [error]


def test_warm_workers_that_die_are_replaced_up_to_a_limit(driver: Driver) -> None:
    driver.told(Welcome(job=driver.job, spare=True))
    for number in range(WARM_DEATH_LIMIT):
        assert of(driver.event(WorkerEnded(token=driver.tokens[number], status=1)), ForkWorkers)
    (leave,) = driver.event(WorkerEnded(token=driver.tokens[WARM_DEATH_LIMIT], status=1))
    assert isinstance(leave, Leave) and "before they have a seat" in leave.reason


def test_commits_are_passed_on(driver: Driver) -> None:
    version = Version(v=3, lineage=0)
    assert sent(driver.event(VersionCommitted(generation=0, version=version))) == [
        Committed(generation=0, node="n0", version=version)
    ]


@pytest.mark.parametrize("message", [Refused(reason="no"), Shutdown(code=3, reason="over")])
def test_the_coordinator_ends_the_node(driver: Driver, message: Any) -> None:
    (leave,) = driver.told(message)
    assert isinstance(leave, Leave)
    assert driver.told(Assign(generation=0, seats=(0,), solo=False)) == []


def test_a_replicator_that_dies_while_idle_is_started_and_configured_again(driver: Driver) -> None:
    driver.seated()
    driver.told(replicate(0))
    effects = driver.event(ReplicatorEnded(status=-9), now=1.0)
    assert effects[:2] == [StartReplicator(after_death=True), ConfigureReplicator(replicate=replicate(0))]
    (warning,) = sent(effects)
    assert (warning.event, warning.fields["kind"], warning.fields["deaths"]) == ("warning", "replicator_restarted", 1)
    assert len(effects) == 3  # no fence, nobody is told that anything failed


def test_a_replicator_that_dies_before_it_has_orders_is_only_started(make_job: Callable[..., JobSpec]) -> None:
    driver = Driver("n2", make_job()).warm()
    assert driver.event(ReplicatorEnded(status=-9))[:1] == [StartReplicator(after_death=True)]
    driver.told(Assign(generation=1, seats=(2, 3), solo=True))
    effects = driver.event(ReplicatorEnded(status=-9))
    assert not of(effects, FreezeReplicator) and not of(effects, ConfigureReplicator)


def test_a_replicator_that_dies_during_a_fence_is_replaced_by_a_frozen_one(driver: Driver) -> None:
    driver.seated()
    driver.told(replicate(0))
    driver.told(Fence(generation=1, reason=""))
    for rank, token in enumerate(driver.tokens[:2]):
        driver.unwind(token, rank, 1)
    effects = driver.event(ReplicatorEnded(status=-9))
    assert effects[:2] == [StartReplicator(after_death=True), FreezeReplicator(generation=1)]
    assert not of(effects, ConfigureReplicator) and not of(effects, SendFenceAck)
    assert of(driver.event(ReplicatorFrozen(generation=1)), SendFenceAck)
    # Also after it had frozen: it is configured when the plan comes, like the one before it.
    effects = driver.event(ReplicatorEnded(status=-9))
    assert of(effects, FreezeReplicator) and not of(driver.event(ReplicatorFrozen(generation=1)), SendFenceAck)


def test_fetches_that_were_not_answered_are_ordered_again(make_job: Callable[..., JobSpec]) -> None:
    driver = Driver("n2", make_job()).warm()
    driver.told(Assign(generation=1, seats=(2, 3), solo=True))
    first = driver.told(recover(1, ("n0", "n0", "n2", "n2"), new="n2", source="n0"))
    driver.event(SeatFetched(generation=1, rank=2, nbytes=8, seconds=0.1))
    effects = driver.event(ReplicatorEnded(status=-9))
    assert [type(effect) for effect in effects[:2]] == [StartReplicator, ConfigureReplicator]
    assert of(effects, FetchSeat) == [fetch for fetch in of(first, FetchSeat) if fetch.rank == 3]
    driver.event(SeatFetchFailed(generation=1, rank=3, source_node="n0", detail="gone"))
    assert not of(driver.event(ReplicatorEnded(status=-9)), FetchSeat)
    driver.told(Fence(generation=2, reason=""))
    assert not of(driver.event(ReplicatorEnded(status=-9)), FetchSeat)


def test_a_node_whose_replicator_keeps_dying_is_given_up(driver: Driver) -> None:
    driver.seated()
    driver.told(replicate(0))
    for number in range(DEATH_LIMIT):
        assert not of(driver.event(ReplicatorEnded(status=1), now=float(number)), Leave)
    # Once it has been quiet for a while, earlier deaths do not count.
    assert not of(driver.event(ReplicatorEnded(status=1), now=DEATH_WINDOW_S + 3.5), Leave)
    leaves = []
    while not leaves:
        leaves = of(driver.event(ReplicatorEnded(status=1), now=DEATH_WINDOW_S + 4.5), Leave)
    assert "replicator" in leaves[0].reason
