"""What the agent machine remembers for a replicator that has to take over from one that died. Pure."""

from __future__ import annotations

from typing import Final

from deadpool_ext.control.agent_events import (
    ConfigureReplicator,
    Effect,
    FetchSeat,
    FreezeReplicator,
    SeatFetched,
    SeatFetchFailed,
    StartReplicator,
)
from deadpool_ext.protocol.messages import Replicate
from deadpool_ext.protocol.types import Rank

#: More deaths than this within the window, and the node is given up.
DEATH_LIMIT: Final = 5
DEATH_WINDOW_S: Final = 60.0


class ReplicatorRecord:
    """The replicator's standing orders, and its deaths.

    All that a replicator knows is in its orders, in slots that outlive it, and in what its peers say again on a new
    connection: a successor that is given the same orders goes on where it stopped.
    """

    def __init__(self) -> None:
        self._replicate: Replicate | None = None
        self._fetches: dict[Rank, FetchSeat] = {}  # not answered yet
        self._deaths: list[float] = []

    @property
    def deaths(self) -> int:
        """How often one died within the window, at the last death."""
        return len(self._deaths)

    def configured(self, replicate: Replicate) -> None:
        """It was told to replicate by this map."""
        self._replicate = replicate

    def unconfigured(self) -> None:
        """The node has no seats any more: a successor would have nothing to do."""
        self._replicate = None
        self._fetches.clear()

    def fetching(self, seat: FetchSeat) -> None:
        """It was told to fetch a seat's state."""
        self._fetches[seat.rank] = seat

    def answered(self, event: SeatFetched | SeatFetchFailed) -> None:
        """It answered for a seat."""
        order = self._fetches.get(event.rank)
        if order is not None and order.generation == event.generation:
            del self._fetches[event.rank]

    def ended(self, generation: int, *, fenced: bool, now: float) -> list[Effect] | None:
        """It died at ``now`` (monotonic seconds): how to start the next one and where to let it go on; None where too
        many died lately.

        ``generation``: the node's; ``fenced``: it is one that a fence began. Until the map of that generation is
        there, all that a successor has to do is to say that it is frozen.
        """
        self._deaths = [at for at in self._deaths if at > now - DEATH_WINDOW_S] + [now]
        if len(self._deaths) > DEATH_LIMIT:
            return None
        effects: list[Effect] = [StartReplicator(after_death=True)]
        if self._replicate is not None and self._replicate.generation == generation:
            effects.append(ConfigureReplicator(replicate=self._replicate))
            effects += [seat for seat in self._fetches.values() if seat.generation == generation]
        elif fenced:
            effects.append(FreezeReplicator(generation=generation))
        return effects
