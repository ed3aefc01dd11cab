"""Who holds everybody up: a graph of waiting ranks, from one look at every seat. Pure.

An arrow goes from whoever waits to what it needs:

* in a collective (number n of its group): the members that have begun fewer than n collectives of this group;
* in a collective that is queued on a device (NCCL) and may be over: the same members; if there are any, it is not;
* point to point: the peer;
* at the gate of an iteration: every rank that is not there yet; if there is none, *replication* is what is late.

A rank at an end of the graph that does not move is a *root*: it holds up whoever reaches it. So does a stopped
process, whatever it waits for. Ranks that move, and those of which too little is known (no fresh look, another
generation), are never blamed, nor is anybody who waits for them. A rank that may wait for its device is reported, but
not blamed either: for whom the device waits in point-to-point operations, the host does not see. What is left are
ranks that wait for each other, or for a collective in which everybody has arrived: a *knot*, in which nobody is to
blame more than the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deadpool_ext.protocol.messages import Wait
from deadpool_ext.protocol.types import NodeId, Rank

GATE = "gate"
#: States of a process (letters of /proc/PID/stat) in which it cannot go on: stopped, traced, a zombie.
HALTED = frozenset("TtZ")

#: Where a rank does not wait for its device.
HOST_PLACES = frozenset({"data"})

# Points of the graph: a rank, or what several ranks need alike.
Point = tuple[str, object]
REPLICATION: Point = ("replication", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One rank as it was seen last. ``still_s``: seconds since it moved. ``known``: seen just now, in the current
    generation. ``left``: at the end of the script."""

    rank: Rank
    node: NodeId
    iteration: int
    place: str
    still_s: float
    process: str = "S"
    waits: tuple[Wait, ...] = ()
    queued: tuple[Wait, ...] = ()
    issued: Mapping[str, int]
    known: bool = True
    left: bool = False

    @property
    def halted(self) -> bool:
        """The process itself cannot go on."""
        return self.process in HALTED

    @property
    def unclear(self) -> bool:
        """It may wait for its device, and that for others in a way that is not seen (point to point)."""
        return bool(self.queued) and self.place not in HOST_PLACES and not self.halted

    @property
    def waiting(self) -> bool:
        """It waits for others."""
        return bool(self.waits) or self.place == GATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A rank that waits, and in what (``group`` is empty at the gate, ``number`` is 0 there and point to point).
    ``others``: the other members of the group, or the peer."""

    rank: Rank
    operation: str
    group: str = ""
    number: int = 0
    others: tuple[Rank, ...] = ()

    def __str__(self) -> str:
        """For people."""
        shown = ", ".join(str(rank) for rank in self.others[:4]) + (", ..." if len(self.others) > 4 else "")
        whose = f" of {self.group} with {shown}" if self.group else ""
        return f"rank {self.rank} {'in' if self.group else 'at'} {self.operation}{whose}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """``rank`` does not move and holds up ``held`` (perhaps nobody). Without a rank: replication is late
    (``replication``), or ``held`` wait for each other."""

    rank: Rank | None
    still_s: float
    held: tuple[Held, ...]
    replication: bool = False
    sure: bool = True  # else it may wait for others, and is only reported

    @property
    def knot(self) -> bool:
        """Ranks wait for each other."""
        return self.rank is None and not self.replication


def find(seats: Iterable[Seat], still_s: float) -> list[Standstill]:
    """All that stands still for ``still_s`` seconds at least: roots by rank, then replication, then the knot."""
    by_rank = {seat.rank: seat for seat in seats}
    needs = _graph(by_rank)
    needed_by: dict[Point, list[Point]] = {}
    for one, others in needs.items():
        for other in others:
            needed_by.setdefault(other, []).append(one)
    found: list[Standstill] = []
    settled: set[Point] = set()  # what is explained: leads to a root, or to somebody who moves or is not known
    free: set[Point] = set()
    for rank, seat in sorted(by_rank.items()):
        point: Point = ("rank", rank)
        if not seat.known or (seat.still_s < still_s and not seat.left):
            free.add(point)
        elif seat.halted or not (seat.waiting or seat.left or (seat.unclear and needs[point])):
            reached = _reach([point], needed_by)
            settled |= reached
            held = () if seat.unclear else _held(by_rank, reached, rank)
            found.append(Standstill(rank=rank, still_s=seat.still_s, held=held, sure=not seat.unclear))
    if REPLICATION in needed_by:
        reached = _reach([REPLICATION], needed_by)
        settled |= reached
        late = {iteration for kind, iteration in needed_by[REPLICATION] if kind == "gate"}
        longest = max(seat.still_s for seat in by_rank.values() if seat.place == GATE and seat.iteration in late)
        if longest >= still_s:
            held = _held(by_rank, reached, None)
            found.append(Standstill(rank=None, still_s=longest, held=held, replication=True))
    settled |= _reach(free, needed_by)
    tied = [seat for rank, seat in by_rank.items() if ("rank", rank) not in settled and seat.waiting and not seat.left]
    if tied:
        points: set[Point] = {("rank", seat.rank) for seat in tied}
        shortest = min(seat.still_s for seat in tied)
        found.append(Standstill(rank=None, still_s=shortest, held=_held(by_rank, points, None)))
    return found


def _graph(by_rank: Mapping[Rank, Seat]) -> dict[Point, set[Point]]:
    needs: dict[Point, set[Point]] = {}
    for rank, seat in by_rank.items():
        if not seat.known or seat.left or seat.halted:
            continue
        mine: set[Point] = set()
        needs["rank", rank] = mine
        if seat.place == GATE:
            gate: Point = ("gate", seat.iteration)
            mine.add(gate)
            if gate not in needs:
                needs[gate] = _behind(seat.iteration, by_rank)
        for wait in seat.waits:
            if not wait.number:  # point to point
                mine |= {("rank", peer) for peer in wait.peers if peer in by_rank}
                continue
            operation: Point = ("operation", (wait.group, wait.number))
            mine.add(operation)
            if operation not in needs:
                needs[operation] = _late(wait, by_rank)
        for wait in seat.queued:
            mine |= _late(wait, by_rank)  # nobody is late: it is over, or all have arrived
    return needs


def _late(wait: Wait, by_rank: Mapping[Rank, Seat]) -> set[Point]:
    """Members that have not begun this collective; if all have: those whose process cannot go on."""
    members = [by_rank[rank] for rank in wait.ranks if rank in by_rank]
    late = [seat for seat in members if not seat.known or seat.issued.get(wait.group, 0) < wait.number]
    return {("rank", seat.rank) for seat in late or members if late or seat.halted}


def _behind(iteration: int, by_rank: Mapping[Rank, Seat]) -> set[Point]:
    """What the gate of ``iteration`` waits for."""
    behind: set[Point] = set()
    for rank, seat in by_rank.items():
        there = seat.iteration > iteration or (seat.iteration == iteration and seat.place == GATE)
        if not seat.left and not (seat.known and there):
            behind.add(("rank", rank))
    return behind or {REPLICATION}


def _reach(start: Iterable[Point], needed_by: Mapping[Point, list[Point]]) -> set[Point]:
    """Everything that leads to one of ``start``, itself included."""
    reached = set(start)
    left = list(reached)
    while left:
        for point in needed_by.get(left.pop(), ()):
            if point not in reached:
                reached.add(point)
                left.append(point)
    return reached


def _held(by_rank: Mapping[Rank, Seat], points: Iterable[Point], but: Rank | None) -> tuple[Held, ...]:
    held = []
    for kind, rank in points:
        if kind != "rank" or rank == but or not isinstance(rank, int):
            continue
        seat = by_rank[rank]
        for wait in (*seat.waits, *(one for one in seat.queued if _late(one, by_rank))):
            one = Held(rank=rank, operation=wait.operation, group=wait.group, number=wait.number, others=wait.peers)
            held.append(one)
        if seat.place == GATE:
            held.append(Held(rank=rank, operation="the gate"))
    return tuple(sorted(held, key=lambda one: (one.rank, one.group, one.number, one.operation)))
