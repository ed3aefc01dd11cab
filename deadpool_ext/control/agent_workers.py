"""What the agent machine remembers of its workers and of seats that wait for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.messages import Assign, WorkerExited
from deadpool_ext.protocol.types import Rank, WorkerState


@dataclass(slots=True)
class WorkerRecord:
    """One worker process. ``rank`` is None while it is warm."""

    token: str
    pid: int = 0
    start_ticks: int = 0
    connected: bool = False
    rank: Rank | None = None
    generation: int = 0  # in which it took its seat
    fenced: int = -1
    unwound: int = -1
    state: WorkerState | None = None
    last_words: WorkerExited | None = None  # what it said about its own end
    condemned: bool = False  # killed by us: its end is expected

    @property
    def warm(self) -> bool:
        """Without a seat, and wanted."""
        return self.rank is None and not self.condemned


@dataclass(slots=True)
class OpenSeat:
    """A seat that waits for a warm worker, and what its worker is to be told after it was seated."""

    assign: Assign
    facts: dict[str, Any]
    backlog: list[Any] = field(default_factory=list)  # messages, or an AnnounceArena without token
