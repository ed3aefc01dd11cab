"""Waiting for something slow in a way that a fence can interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable

from deadpool_ext.comm.errors import ConnectTimeoutError, FencedError


class Cancellation:
    """Set once, by a fence; whoever waits for it or for something else wakes. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._cancelled = False

    def cancel(self) -> None:
        """Wake all waiters."""
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()

    @property
    def cancelled(self) -> bool:
        """Whether the fence has come."""
        return self._cancelled

    def run[T](
        self,
        work: Callable[[], T],
        *,
        interrupt: Callable[[], None],
        discard: Callable[[T], None],
        timeout_s: float,
        what: str,
    ) -> T:
        """Run ``work`` on a thread of its own and return its result or raise its exception.

        Gloo waits for peers where nothing can wake it. When the fence comes first this raises ``FencedError`` at once,
        and ``ConnectTimeoutError`` when ``timeout_s`` seconds have passed. Then ``interrupt`` is called, to end
        ``work`` early where that can be done; it ends in the background (so it must be bounded itself) and ``discard``
        gets what it made. Nothing it does may touch a tensor.
        """
        result: list[T] = []
        error: list[BaseException] = []
        abandoned = False
        finished = False

        def body() -> None:
            nonlocal finished
            try:
                result.append(work())
            # Reported to the caller below, whatever it is: this is where the thread ends.
            except BaseException as failure:
                error.append(failure)
            with self._condition:
                finished = True
                keep = not abandoned
                self._condition.notify_all()
            if not keep and result:
                discard(result.pop())

        thread = threading.Thread(target=body, name="deadpool-connect", daemon=True)
        thread.start()
        with self._condition:
            in_time = self._condition.wait_for(lambda: finished or self._cancelled, timeout_s)
            abandoned = not finished
            cancelled = self._cancelled
        if abandoned:
            interrupt()
            if cancelled:
                raise FencedError(f"{what}: interrupted by a fence")
            raise ConnectTimeoutError(f"{what}: not finished within {timeout_s:.1f} s")
        assert in_time
        thread.join()
        if error:
            try:
                raise error[0]
            finally:
                error.clear()  # the frame would keep the exception, and it the frame
        if cancelled:
            discard(result.pop())
            raise FencedError(f"{what}: interrupted by a fence")
        return result.pop()
