"""A wait that a fence interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from deadpool_ext.comm.background import Cancellation
from deadpool_ext.comm.errors import ConnectTimeoutError, FencedError

LONG_S = 60.0


def run(cancellation: Cancellation, work: Callable[[], Any], **changes: Any) -> Any:
    options: dict[str, Any] = {
        "interrupt": lambda: None,
        "discard": lambda result: None,
        "timeout_s": LONG_S,
        "what": "test",
    } | changes
    return cancellation.run(work, **options)


def test_result_and_exception_come_through() -> None:
    assert run(Cancellation(), lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run(Cancellation(), lambda: 1 // 0)


@pytest.mark.parametrize("early", [True, False])
def test_a_fence_ends_the_wait_at_once_and_the_late_result_is_discarded(early: bool) -> None:
    cancellation = Cancellation()
    working, interrupted, discarded = threading.Event(), threading.Event(), threading.Event()
    results: list[int] = []

    def work() -> int:
        working.set()
        if not early:
            cancellation.cancel()
        assert interrupted.wait(LONG_S)
        return 7

    def discard(result: int) -> None:
        results.append(result)
        discarded.set()

    if early:
        cancellation.cancel()
    with pytest.raises(FencedError, match="test"):
        run(cancellation, work, interrupt=interrupted.set, discard=discard)
    assert discarded.wait(LONG_S)
    assert results == [7]
    assert cancellation.cancelled


def test_a_deadline_ends_the_wait_too() -> None:
    release = threading.Event()
    with pytest.raises(ConnectTimeoutError, match="not finished within"):
        run(Cancellation(), lambda: release.wait(LONG_S), timeout_s=0.01, interrupt=release.set)


def test_an_exception_after_the_wait_was_abandoned_is_nobodys() -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    ended = threading.Event()

    def work() -> None:
        try:
            raise ValueError("late")
        finally:
            ended.set()

    with pytest.raises((FencedError, ValueError)):
        run(cancellation, work)
    assert ended.wait(LONG_S)
