"""Standing still between two iterations when the coordinator asks for it: the boundary of a planned swap."""

from __future__ import annotations

import threading
from collections.abc import Callable

from deadpool_ext.protocol.messages import Pause, PauseAck, Paused


class PausePoint:
    """One worker's. :meth:`ask` is for the control thread, the rest for the main thread."""

    def __init__(self, rank: int, condition: threading.Condition, send: Callable[[object], None]) -> None:
        """``condition``: notified at every fence and when the session is lost."""
        self._rank = rank
        self._condition = condition
        self._send = send
        self._generation = -1
        self._after = -1
        self._passed = -1

    def begin(self, generation: int, iteration: int) -> None:
        """The main thread works in ``generation``, and holds the end of ``iteration``."""
        with self._condition:
            if generation > self._generation:
                self._generation, self._after = generation, -1
            self._passed = iteration

    def ask(self, message: Pause) -> None:
        """Stand still after that iteration, or go on. Answered at once with how far the main thread is."""
        with self._condition:
            if message.generation != self._generation:
                return  # INV-4
            self._after, captured = message.after, self._passed
            self._condition.notify_all()
        if message.after >= 0:
            self._send(PauseAck(generation=message.generation, rank=self._rank, after=message.after, captured=captured))

    def reach(self, iteration: int, over: Callable[[], bool]) -> None:
        """The main thread finished ``iteration``: return at once, or when it is told to go on or ``over()`` holds."""
        told = False
        while True:
            with self._condition:
                if self._after != iteration or over():
                    self._passed = max(self._passed, iteration)
                    return
                generation = self._generation
                if told:
                    self._condition.wait()
                    continue
            # Not under the lock: whoever reads the other end may be slow.
            self._send(Paused(generation=generation, rank=self._rank, iteration=iteration))
            told = True
