"""The worker session: waiting, fences, interruption, the store host, fault points."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from deadpool_ext.control import injection
from deadpool_ext.control import session as session_module
from deadpool_ext.control.session import (
    FencedError,
    SessionLostError,
    SupersededError,
    WaitTimeoutError,
    WorkerSession,
)
from deadpool_ext.control.wire import BlockingConnection
from deadpool_ext.protocol.messages import (
    ArenaReady,
    CollectiveFailed,
    FaultOver,
    FaultReached,
    Fence,
    Finish,
    HostStore,
    Rendezvous,
    StoreReady,
    Strike,
    Struck,
    WorkerFenced,
)

Pair = tuple[BlockingConnection, WorkerSession]
Open = Callable[..., Pair]


def fence(generation: int) -> Fence:
    return Fence(generation=generation, reason="test")


def test_wait_for_takes_the_message_of_its_generation(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    agent.send(Rendezvous(generation=0, host="a", port=1))
    agent.send(Finish(generation=0))
    assert session.wait_for(Finish, 0, 5.0) == Finish(generation=0)
    assert session.wait_for(Rendezvous, 0, 5.0).host == "a"
    with pytest.raises(WaitTimeoutError, match="no Finish of generation 0"):
        session.wait_for(Finish, 0, 0.0)


def test_f15_a_newer_fence_ends_a_wait_at_once_and_drops_older_messages(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    agent.send(Rendezvous(generation=0, host="old", port=1))
    threading.Timer(0.05, agent.send, (fence(1),)).start()
    with pytest.raises(SupersededError) as caught:
        session.wait_for(Finish, 0, 30.0)
    assert caught.value.generation == 1
    assert isinstance(agent.receive(), WorkerFenced)
    agent.send(Rendezvous(generation=0, host="late", port=1))
    agent.send(Rendezvous(generation=1, host="new", port=1))
    assert session.wait_for(Rendezvous, 1, 5.0).host == "new"
    with pytest.raises(SupersededError):
        session.wait_for(Rendezvous, 0, 5.0)


def test_fence_callbacks_run_on_the_control_thread_before_the_answer(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    seen: list[tuple[int, str]] = []
    session.on_fence(lambda message: seen.append((message.generation, threading.current_thread().name)))
    agent.send(fence(1))
    answer = agent.receive()
    assert (answer.generation, answer.rank) == (1, 0)
    assert seen == [(1, "deadpool-control")]
    assert session.fenced and session.announced == 1 and session.generation == 0
    session.enter_generation(1)
    assert not session.fenced


def test_a_fence_that_came_first_reaches_a_late_callback(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    agent.send(fence(2))
    assert isinstance(agent.receive(), WorkerFenced)
    seen: list[int] = []
    session.on_fence(lambda message: seen.append(message.generation))
    assert seen == [2]
    session.enter_generation(2)
    session.on_fence(lambda message: seen.append(-message.generation))
    assert seen == [2]


def test_old_and_repeated_fences_have_no_effect(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    seen: list[int] = []
    session.on_fence(lambda message: seen.append(message.generation))
    for generation in (0, 2, 2, 1, 3):
        agent.send(fence(generation))
    assert [agent.receive().generation, agent.receive().generation] == [2, 3]
    assert seen == [2, 3]


def test_entering_a_superseded_generation_is_refused(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    agent.send(fence(2))
    agent.receive()
    with pytest.raises(SupersededError):
        session.enter_generation(1)


def test_f17_the_store_host_is_asked_once_a_generation_and_answers(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    agent.send(HostStore(generation=0, rank=0))
    session.set_store_host(lambda generation: ("h", 1000 + generation))
    assert agent.receive() == StoreReady(generation=0, rank=0, host="h", port=1000)
    agent.send(HostStore(generation=1, rank=0))
    assert agent.receive() == StoreReady(generation=1, rank=0, host="h", port=1001)


def test_a_store_that_cannot_be_opened_is_reported(agent_and_session: Pair) -> None:
    agent, session = agent_and_session

    def refuse(generation: int) -> tuple[str, int]:
        raise OSError("no port")

    session.set_store_host(refuse)
    agent.send(HostStore(generation=0, rank=0))
    answer = agent.receive()
    assert isinstance(answer, CollectiveFailed) and "no port" in answer.detail


def test_a_fence_interrupts_a_blocked_main_thread(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    threading.Timer(0.05, agent.send, (fence(1),)).start()
    began = time.monotonic()
    with pytest.raises(FencedError), session.interruptible():
        queue.SimpleQueue[int]().get()
    assert time.monotonic() - began < 5.0
    with pytest.raises(FencedError), session.interruptible():
        pytest.fail("a fenced session does not enter an interruptible region")
    signal.raise_signal(session_module.INTERRUPT_SIGNAL)  # outside: nothing happens
    session.enter_generation(1)
    with session.interruptible():
        signal.raise_signal(session_module.INTERRUPT_SIGNAL)  # not fenced: nothing happens


def test_nested_regions_are_left_with_their_outermost(agent_and_session: Pair) -> None:
    agent, session = agent_and_session
    with pytest.raises(FencedError), session.interruptible():
        with session.interruptible():
            pass
        agent.send(fence(1))
        queue.SimpleQueue[int]().get()
    assert session._interruptible == 0


def test_waits_end_when_the_agent_is_gone(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(session_module, "LOST_GRACE_S", 0.05)
    monkeypatch.setattr(session_module.os, "_exit", exits.put)
    agent, session = open_session()
    agent.close()
    with pytest.raises(SessionLostError):
        session.wait_for(ArenaReady, 0, 30.0)
    assert exits.get(timeout=10) == session_module.EXIT_SESSION_LOST


FAULT = {"id": 3, "kind": "kill-node", "node": "n0", "rank": None, "step": 5, "phase": "forward"}


def test_a_fault_point_reports_and_waits_until_fenced(open_session: Open) -> None:
    agent, session = open_session(faults=(FAULT,))
    session.fault_point("forward", 4)
    session.fault_point("backward", 5)

    def serve() -> None:
        reached.append(agent.receive())
        agent.send(fence(1))

    reached: list[Any] = []
    thread = threading.Thread(target=serve)
    thread.start()
    session.fault_point("forward", 5)
    thread.join(10)
    assert reached == [FaultReached(fault_id=3, node="n0", rank=0)]


def test_a_fault_nobody_carries_out_is_given_up(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection, "FAULT_WAIT_S", 0.05)
    agent, session = open_session(faults=(FAULT,))
    session.fault_point("forward", 5)
    assert isinstance(agent.receive(), FaultReached)
    assert agent.receive().event == "warning"
    session.fault_point("forward", 5)  # used


def test_whoever_stands_at_a_fault_goes_on_when_it_is_over(open_session: Open) -> None:
    agent, session = open_session(faults=(FAULT,))
    thread = threading.Thread(target=lambda: (agent.receive(), agent.send(FaultOver(fault_id=3))))
    thread.start()
    session.fault_point("forward", 5)
    thread.join(10)


def test_what_a_rank_does_to_itself_happens_where_it_stands(open_session: Open) -> None:
    fault = FAULT | {"kind": "raise-rank", "node": None, "rank": 0}
    agent, session = open_session(faults=(fault,))
    told: list[Any] = []

    def serve() -> None:
        told.append(agent.receive())
        agent.send(Strike(fault=fault, node="n0", rank=0))
        told.append(agent.receive())

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(injection.InjectedError, match="fault 3"):
        session.fault_point("forward", 5)
    thread.join(10)
    assert [type(message) for message in told] == [FaultReached, Struck]


def test_a_strike_for_the_main_thread_waits_for_the_next_place(open_session: Open) -> None:
    agent, session = open_session()
    agent.send(Strike(fault=FAULT | {"kind": "raise-rank", "step": None, "phase": None}, node="n0", rank=0))
    end = time.monotonic() + 10
    with pytest.raises(injection.InjectedError):
        while time.monotonic() < end:
            session.fault_point("forward", 1)


def test_the_lock_is_held_for_as_long_as_said() -> None:
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    injection.hold_gil(0.3)
    ended = time.monotonic()
    stop.set()
    thread.join(10)
    assert ended - began >= 0.29
    assert not [at for at in ticks if began + 0.05 < at < ended - 0.05]


@pytest.mark.parametrize("change", [{"node": "n1"}, {"rank": 1, "node": None}, {"step": None}])
def test_other_places_are_not_fault_points(open_session: Open, change: dict[str, Any]) -> None:
    _, session = open_session(faults=(FAULT | change,))
    session.fault_point("forward", 5)
