"""Asks NCCL's communicators how they are: an error there may wake nobody, since the host waits for a stream.

A thread of its own asks once in a while and reports the first error of a generation; who is to blame is decided
elsewhere, with everything else that is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

PERIOD_S: Final = 1.0
_NAMED: Final = 4  # groups in a report


class Watched(Protocol):
    """What :class:`~deadpool_ext.comm.registry.Communicators` gives."""

    @property
    def generation(self) -> int: ...
    @property
    def fenced(self) -> bool: ...
    def errors(self) -> Mapping[str, str]: ...


class ErrorWatcher:
    """Calls ``report(generation, detail)`` from its thread, at most once a generation."""

    def __init__(self, watched: Watched, report: Callable[[int, str], None], period_s: float = PERIOD_S) -> None:
        self._watched = watched
        self._report = report
        self._period_s = period_s
        self._told = -1  # the generation whose error was reported last
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deadpool-nccl-errors", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. Idempotent."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def look(self) -> None:
        """Ask once."""
        watched = self._watched
        generation = watched.generation
        if generation <= self._told or watched.fenced:
            return
        errors = watched.errors()
        # A fence aborts communicators, which then have errors that mean nothing.
        if not errors or watched.fenced or watched.generation != generation:
            return
        self._told = generation
        named = ", ".join(f"{error} in group '{group}'" for group, error in sorted(errors.items())[:_NAMED])
        more = f" and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
        self._report(generation, f"NCCL reports {named}{more}")

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            self.look()
