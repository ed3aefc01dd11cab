"""Where a worker stands still between two iterations: what is promised is kept, whatever the order."""

from __future__ import annotations

import queue
import threading

import pytest

from deadpool_ext.control.pausing import PausePoint
from deadpool_ext.protocol.messages import Pause, PauseAck, Paused


class Worker:
    """A main thread that finishes iterations as it is told to."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.sent: queue.Queue[object] = queue.Queue()
        self.point = PausePoint(3, self.condition, self.sent.put)
        self.point.begin(0, 0)
        self.fenced = False
        self.passed: queue.Queue[int] = queue.Queue()

    def reach(self, iteration: int) -> None:
        """On a thread of its own: it may stand still."""

        def run() -> None:
            self.point.reach(iteration, lambda: self.fenced)
            self.passed.put(iteration)

        threading.Thread(target=run, daemon=True).start()

    def fence(self) -> None:
        """A newer generation ends the standing still."""
        with self.condition:
            self.fenced = True
            self.condition.notify_all()


def test_it_stands_still_where_it_promised_until_a_fence() -> None:
    worker = Worker()
    worker.point.ask(Pause(generation=0, after=2))
    assert worker.sent.get(timeout=5) == PauseAck(generation=0, rank=3, after=2, captured=0)
    worker.reach(1)
    assert worker.passed.get(timeout=5) == 1
    worker.reach(2)
    assert worker.sent.get(timeout=5) == Paused(generation=0, rank=3, iteration=2)
    assert worker.passed.empty()
    worker.fence()
    assert worker.passed.get(timeout=5) == 2


@pytest.mark.parametrize("after", [-1, 4])
def test_it_goes_on_when_the_swap_is_given_up_or_the_boundary_moves(after: int) -> None:
    worker = Worker()
    worker.point.ask(Pause(generation=0, after=1))
    worker.sent.get(timeout=5)
    worker.reach(1)
    worker.sent.get(timeout=5)
    worker.point.ask(Pause(generation=0, after=after))
    assert worker.passed.get(timeout=5) == 1
    if after > 0:
        assert worker.sent.get(timeout=5) == PauseAck(generation=0, rank=3, after=4, captured=0)


def test_past_it_already_it_says_so_and_does_not_stand_still_later() -> None:
    worker = Worker()
    worker.reach(5)
    assert worker.passed.get(timeout=5) == 5
    worker.point.ask(Pause(generation=0, after=5))
    assert worker.sent.get(timeout=5) == PauseAck(generation=0, rank=3, after=5, captured=5)
    worker.reach(6)
    assert worker.passed.get(timeout=5) == 6


def test_orders_of_another_generation_have_no_effect() -> None:
    worker = Worker()
    worker.point.begin(2, 7)
    worker.point.ask(Pause(generation=1, after=8))
    worker.reach(8)
    assert worker.passed.get(timeout=5) == 8
    assert worker.sent.empty()
