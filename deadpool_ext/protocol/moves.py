"""The record of a planned swap that is under way; :mod:`~deadpool_ext.protocol.planned` is the procedure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.messages import WorkerSeated
from deadpool_ext.protocol.types import NodeId, Rank

FIRST_MARGIN = 2  # iterations between the newest that is known and the one after which all stand still


class Stage(enum.StrEnum):
    """How far a planned swap is."""

    PREPARING = "preparing"
    PAUSING = "pausing"
    SWITCHING = "switching"


@dataclass(slots=True, kw_only=True)
class Move:
    """The one that is under way. Times are monotonic seconds."""

    node: NodeId  # gives its seats up
    spare: NodeId  # takes them
    seats: tuple[Rank, ...]
    leaves: bool  # the node leaves the job afterwards; else it waits as a spare
    request: str  # whoever asked; empty: nobody waits for an answer
    generation: int  # in which the newcomer constructs
    stage: Stage = Stage.PREPARING
    seated: dict[Rank, WorkerSeated] = field(default_factory=dict)
    constructed: set[Rank] = field(default_factory=set)
    margin: int = FIRST_MARGIN
    after: int = -1  # the iteration after which all are to stand still
    newest: int = -1  # known to be captured by somebody
    promised: set[Rank] = field(default_factory=set)
    paused: dict[Rank, float] = field(default_factory=dict)
    before: dict[Rank, tuple[int, dict[str, Any] | None]] = field(default_factory=dict)  # how the seats were held
    resumed_at: float | None = None  # the last rank had its state, in the new generation
    seconds: float | None = None  # from the first rank's standing still to the end of the first new step

    @property
    def paused_s(self) -> float:
        """Seconds from the first rank's standing still until all were told to go on."""
        return 0.0 if self.resumed_at is None else round(self.resumed_at - min(self.paused.values()), 6)
