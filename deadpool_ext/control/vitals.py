"""An agent's look at its workers, for every heartbeat: their pulses, and what the kernel says of the processes."""

from __future__ import annotations

from deadpool_ext.comm.pulse import Blocked, Pulse, Reading
from deadpool_ext.control import processes
from deadpool_ext.protocol.messages import Vital, Wait
from deadpool_ext.protocol.types import Rank


class Sampler:
    """Remembers of the last look what tells whether a worker moved since then.

    Of a worker that moved nobody asks what it waits for: only of the others that is told, which keeps heartbeats small.
    """

    def __init__(self) -> None:
        self._moves: dict[str, tuple[int, int]] = {}  # by worker: generation and moves

    def look(self, token: str, rank: Rank, pid: int, pulse: Pulse) -> Vital | None:
        """The worker as it is now; None if the process is gone (its end is reported as such)."""
        state = processes.state(pid)
        if state is None:
            return None
        reading = pulse.read()
        now = (reading.generation, reading.moves)
        still, self._moves[token] = self._moves.get(token) == now, now
        return vital(rank, state, reading, in_detail=still)

    def forget(self, token: str) -> None:
        """The worker is gone."""
        self._moves.pop(token, None)


def vital(rank: Rank, state: str, reading: Reading, *, in_detail: bool) -> Vital:
    """The message's form of a reading. ``in_detail``: with waits and counts of collectives."""
    return Vital(
        rank=rank,
        generation=reading.generation,
        iteration=reading.iteration,
        place=reading.place,
        place_s=reading.place_s,
        moves=reading.moves,
        process=state,
        waits=tuple(_wait(rank, blocked) for blocked in reading.blocked) if in_detail else (),
        queued=tuple(_wait(rank, queued) for queued in reading.queued) if in_detail else (),
        issued=reading.collectives if in_detail else {},
        busy_s=reading.busy_s,
    )


def _wait(rank: Rank, blocked: Blocked) -> Wait:
    peers = tuple(other for other in blocked.ranks if other != rank) if blocked.peer is None else (blocked.peer,)
    return Wait(
        group=blocked.group,
        ranks=blocked.ranks,
        operation=blocked.operation,
        number=blocked.number,
        peers=peers,
        seconds=blocked.seconds,
    )
