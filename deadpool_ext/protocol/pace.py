"""How fast ranks are, from their last iterations, and how long they stand still when all is well."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from deadpool_ext.protocol.types import Rank

ITERATIONS: Final = 50  # of each rank whose busy seconds are kept
STEPS: Final = 100  # finished steps over which standstills are remembered


@dataclass(slots=True)
class Pace:
    """``busy``: per rank, seconds of its last iterations in which it did not wait for others, oldest first."""

    busy: dict[Rank, deque[float]] = field(default_factory=dict)
    _standstills: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=STEPS))  # longest one of each step

    def note_busy(self, rank: Rank, seconds: float) -> None:
        """``rank`` finished an iteration."""
        self.busy.setdefault(rank, deque(maxlen=ITERATIONS)).append(seconds)

    def forget(self, rank: Rank) -> None:
        """The seat has another process, perhaps on another machine."""
        self.busy.pop(rank, None)

    def median(self, ranks: Iterable[Rank]) -> float | None:
        """Median busy seconds of an iteration over all that is known of ``ranks``; None if nothing is."""
        values = [seconds for rank in ranks for seconds in self.busy.get(rank, ())]
        return statistics.median(values) if values else None

    def note_standstill(self, seconds: float) -> None:
        """A rank stood still for so long, waiting for nobody, and went on by itself."""
        self._standstills[-1] = max(self._standstills[-1], seconds)

    def note_step(self) -> None:
        """The job finished a step."""
        self._standstills.append(0.0)

    @property
    def longest_standstill(self) -> float:
        """Seconds, over the last ``STEPS`` finished steps."""
        return max(self._standstills)
