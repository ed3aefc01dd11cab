"""The last look at every seat, since when each stands still, and what has been said about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.hangs import HALTED, Seat
from deadpool_ext.protocol.messages import Vital
from deadpool_ext.protocol.pace import Pace
from deadpool_ext.protocol.types import NodeId, Rank

#: Places in which standing still is usual: not taken for how long a normal standstill is.
QUIET_PLACES = frozenset({"setup", "eval", "save", "recovery"})
REPLICATION_LATE = "replication"
KNOT = "knot"
#: What stands still: a rank, replication, or ranks that wait for each other.
Subject = Rank | str


@dataclass(slots=True, kw_only=True)
class Look:
    """What was seen of one seat last (times: monotonic seconds of the coordinator)."""

    node: NodeId
    vital: Vital
    seen_at: float
    moved_at: float  # it stands still since then
    iterations: int = 0  # finished under our eyes by this process


@dataclass(slots=True, kw_only=True)
class Told:
    """A standstill that was reported."""

    since: float
    place: str
    stack: tuple[str, ...] = ()  # innermost frame first; of a knot: where some of its ranks are
    problem: str = "no answer yet"  # why there is no stack


@dataclass(slots=True)
class Vitals:
    """Plain bookkeeping; times in monotonic seconds."""

    looks: dict[Rank, Look] = field(default_factory=dict)
    told: dict[Subject, Told] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    slow: dict[NodeId, float] = field(default_factory=dict)  # slow nodes that were reported -> last seen slow
    slow_swap_at: float | None = None  # when one was replaced last
    running_since: float | None = None  # in the present generation
    generation: int = -1  # that ``running_since`` is of
    shown_ranks: list[dict[str, Any]] = field(default_factory=list)  # for status.json
    shown_nodes: dict[NodeId, dict[str, Any]] = field(default_factory=dict)
    shown_at: float = -1e9
    asked: dict[int, tuple[Rank, Subject]] = field(default_factory=dict)  # by number of the Inspect: of whom, and why
    questions: int = 0

    def note(self, node: NodeId, vital: Vital, now: float) -> tuple[Told, float] | None:
        """A fresh look. If the seat had been reported and goes on: that report, and for how long it stood."""
        before = self.looks.get(vital.rank)
        look = Look(node=node, vital=vital, seen_at=now, moved_at=now)
        self.looks[vital.rank] = look
        if before is None or before.node != node:
            return None
        look.iterations = before.iterations
        old = before.vital
        if (old.generation, old.moves) == (vital.generation, vital.moves):
            look.moved_at = before.moved_at
            return None
        # It moved at some time between the two looks.
        look.moved_at = max(before.seen_at, now - vital.place_s)
        stood = max(0.0, look.moved_at - self.still_since(before))
        if old.generation == vital.generation:
            if vital.iteration > old.iteration > 0:
                look.iterations += 1
                if vital.busy_s > 0:
                    self.pace.note_busy(vital.rank, vital.busy_s)
            normal = not old.waits and old.place not in QUIET_PLACES and old.process not in HALTED
            if normal and self.running_since is not None:
                self.pace.note_standstill(stood)
        told = self.told.pop(vital.rank, None)
        return None if told is None else (told, stood)

    def still_since(self, look: Look) -> float:
        """Since when this seat stands still in this generation."""
        return look.moved_at if self.running_since is None else max(look.moved_at, self.running_since)

    def enter(self, generation: int, now: float) -> None:
        """The job runs: standstills count from now on if it did not run in this generation before."""
        if self.running_since is None or self.generation != generation:
            self.pause()
            self.running_since, self.generation = now, generation

    def pause(self) -> None:
        """The job does not run: nobody's standing still means anything."""
        self.running_since = None
        self.told.clear()
        self.asked.clear()

    def forget(self, rank: Rank) -> None:
        """The seat gets another process."""
        self.looks.pop(rank, None)
        self.told.pop(rank, None)
        self.pace.forget(rank)

    def shift(self, seconds: float) -> None:
        """Forgive everybody ``seconds``: nobody was looking."""
        for look in self.looks.values():
            look.seen_at += seconds
            look.moved_at += seconds
        for told in self.told.values():
            told.since += seconds
        if self.running_since is not None:
            self.running_since += seconds

    def seats(
        self, seat_nodes: Iterable[NodeId], generation: int, left: Iterable[Rank], now: float, fresh_s: float
    ) -> list[Seat]:
        """Every seat as :func:`~deadpool_ext.protocol.hangs.find` takes it. ``fresh_s``: how old a look may be."""
        gone = set(left)
        seats = []
        for rank, node in enumerate(seat_nodes):
            look = self.looks.get(rank)
            if look is None or look.node != node:
                seats.append(Seat(rank=rank, node=node, iteration=0, place="", still_s=0.0, issued={}, known=False))
                continue
            vital = look.vital
            seats.append(
                Seat(
                    rank=rank,
                    node=node,
                    iteration=vital.iteration,
                    place=vital.place,
                    still_s=max(0.0, now - self.still_since(look)),
                    process=vital.process,
                    waits=vital.waits,
                    queued=vital.queued,
                    issued=vital.issued,
                    known=vital.generation == generation and now - look.seen_at <= fresh_s,
                    left=rank in gone,
                )
            )
        return seats
