"""Faults on purpose: which are due, what each hits, and when it really happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deadpool_ext.protocol.fault_kinds import Target
from deadpool_ext.protocol.faults import FaultSpec
from deadpool_ext.protocol.messages import FaultReached, Strike, Struck
from deadpool_ext.protocol.types import NodeId, Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Seating:
    """Who sits where, as far as a fault needs to know."""

    seat_nodes: Sequence[NodeId]
    spares: Sequence[NodeId]
    replica_of: Sequence[Sequence[Rank]]

    def place(self, fault: FaultSpec, reached: FaultReached | None) -> tuple[NodeId | None, Rank | None]:
        """The node that carries the fault out (or is hit), and the rank that it hits. No node: nothing to hit."""
        match fault.about.target:
            case Target.NODE | Target.JOB:
                return fault.node, None
            case Target.SPARE:  # one that is named may have been chosen meanwhile, and is setting itself up
                return fault.node or (self.spares[0] if self.spares else None), None
        if fault.kind == "sticky-device-error" and fault.rank is None:
            return fault.node, None  # the device is the node's: all its ranks lose it
        rank = fault.rank if fault.rank is not None else reached.rank if reached is not None else None
        if rank is None:
            rank = next((seat for seat, node in enumerate(self.seat_nodes) if node == fault.node), None)
        if rank is None or rank >= len(self.seat_nodes):
            return None, None
        if fault.kind == "corrupt-replica":  # stored where the peer sits
            hosts = self.replica_of[rank]
            return (self.seat_nodes[hosts[0]] if hosts else None), rank
        return self.seat_nodes[rank], rank


class Strikes:
    """Faults of the job. Those with the same step and phase happen together: when all of them are reached."""

    def __init__(self, faults: Iterable[FaultSpec]) -> None:
        self._faults = {fault.id: fault for fault in faults}
        self._reached: dict[int, FaultReached] = {}
        self._due: Counter[int] = Counter()  # how often each was handed out
        self._happened: Counter[int] = Counter()
        self._unclaimed: list[Struck] = []

    @property
    def timed(self) -> list[FaultSpec]:
        """Faults given as ``after=SECONDS``."""
        return [fault for fault in self._faults.values() if fault.timed]

    @property
    def next_id(self) -> int:
        """The id of the next fault that is added."""
        return max(self._faults, default=-1) + 1

    @property
    def missed(self) -> list[FaultSpec]:
        """Faults that never happened, by id."""
        return [fault for _, fault in sorted(self._faults.items()) if not self._happened[fault.id]]

    def add(self, fault: FaultSpec) -> None:
        """A fault for a running job; its id must be new."""
        self._faults[fault.id] = fault

    def is_used_up(self, fault_id: int) -> bool:
        """Whether nothing is to happen where this fault is reached: it is unknown, or was handed out often enough."""
        fault = self._faults.get(fault_id)
        return fault is None or fault.timed or self._due[fault_id] >= fault.times

    def reached(self, message: FaultReached, seating: Seating) -> tuple[str, list[Strike]] | None:
        """A process stands at its fault. Returns the group's name and what is due now (empty: the rest is awaited).

        None: unknown, used up, or known to be reached.
        """
        if self.is_used_up(message.fault_id) or message.fault_id in self._reached:
            return None
        fault = self._faults[message.fault_id]
        self._reached[fault.id] = message
        group = self._group(fault)
        complete = all(other.id in self._reached or self._due[other.id] for other in group)
        return _name(fault), self._strike(group, seating) if complete else []

    def group_due(self, name: str, seating: Seating) -> list[Strike]:
        """The rest of a group did not come in time: all of it is due."""
        group = [fault for fault in self._faults.values() if not fault.timed and _name(fault) == name]
        return self._strike(group, seating)

    def timed_due(self, fault_id: int, seating: Seating) -> list[Strike]:
        """A fault given as ``after=`` is due."""
        return self._strike([self._faults[fault_id]], seating)

    def struck(self, message: Struck) -> bool:
        """It happened; False if that is known already (each rank of a node may say so)."""
        fault_id = int(message.fault.get("id", -1))
        if self._happened[fault_id] >= self._due[fault_id]:
            return False
        self._happened[fault_id] += 1
        self._unclaimed.append(message)
        return True

    def claim(self, node: NodeId | None, rank: Rank | None) -> float | None:
        """When what made this node, or rank, fail was carried out (monotonic seconds), or None: it failed by itself.

        With neither (a collective failed somewhere) any fault answers. Each is given out once.
        """
        mine = [
            struck
            for struck in self._unclaimed
            if (node is None and rank is None)
            or (rank is not None and struck.rank == rank)
            or (node is not None and struck.node == node and (rank is None or struck.rank is None))
        ]
        self._unclaimed = [struck for struck in self._unclaimed if struck not in mine]
        return min((struck.mono for struck in mine), default=None)

    def _group(self, fault: FaultSpec) -> list[FaultSpec]:
        return [other for other in self._faults.values() if not other.timed and _name(other) == _name(fault)]

    def _strike(self, faults: list[FaultSpec], seating: Seating) -> list[Strike]:
        due: list[Strike] = []
        for fault in faults:
            if self._due[fault.id] >= fault.times:
                continue
            node, rank = seating.place(fault, self._reached.pop(fault.id, None))
            if node is None:
                continue
            self._due[fault.id] += 1
            content: dict[str, Any] = fault.to_dict()
            due.append(Strike(fault=content, node=node, rank=rank))
        return due


def _name(fault: FaultSpec) -> str:
    return f"{fault.step}/{fault.phase}"
