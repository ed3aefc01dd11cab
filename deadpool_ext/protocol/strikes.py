"""Faults on purpose: which are due, and when they really happened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deadpool_ext.protocol.faults import STRUCK, FaultSpec
from deadpool_ext.protocol.messages import FaultReached, Strike, Struck
from deadpool_ext.protocol.types import NodeId, Rank


class Strikes:
    """Faults of the job. Those with the same step and phase happen together: when all of them are reached."""

    def __init__(self, faults: Iterable[FaultSpec]) -> None:
        self._faults = {fault.id: fault for fault in faults if fault.kind in STRUCK}
        self._reached: dict[int, FaultReached] = {}
        self._struck: set[int] = set()
        self._times: dict[NodeId, float] = {}  # monotonic seconds at which a node was struck
        self._waiting: list[Strike] = []  # due, but no operator has come yet
        self._operators = False

    @property
    def timed(self) -> list[FaultSpec]:
        """Faults given as ``after=SECONDS``."""
        return [fault for fault in self._faults.values() if fault.timed]

    def reached(self, message: FaultReached) -> tuple[str, list[Strike]] | None:
        """A process stands at its fault. Returns the group's name and what is due now (empty: the rest is awaited).

        None: unknown or already struck.
        """
        fault = self._faults.get(message.fault_id)
        if fault is None or fault.timed or fault.id in self._struck or fault.id in self._reached:
            return None
        self._reached[fault.id] = message
        group = self._group(fault)
        complete = all(other.id in self._reached or other.id in self._struck for other in group)
        return _name(fault), self._strike(group) if complete else []

    def group_due(self, name: str) -> list[Strike]:
        """The rest of a group did not come in time: all of it is due."""
        return self._strike([fault for fault in self._faults.values() if not fault.timed and _name(fault) == name])

    def timed_due(self, fault_id: int) -> list[Strike]:
        """A fault given as ``after=`` is due."""
        return self._strike([self._faults[fault_id]])

    def operator_came(self) -> list[Strike]:
        """Somebody who can strike is there: what waited for that."""
        self._operators = True
        due, self._waiting = self._waiting, []
        return due

    def struck(self, message: Struck) -> None:
        """It happened."""
        self._times[message.node] = message.mono

    def time_of(self, node: NodeId | None) -> float | None:
        """Monotonic seconds at which ``node`` was struck, or None."""
        return self._times.get(node) if node is not None else None

    def _group(self, fault: FaultSpec) -> list[FaultSpec]:
        return [other for other in self._faults.values() if not other.timed and _name(other) == _name(fault)]

    def _strike(self, faults: list[FaultSpec]) -> list[Strike]:
        due: list[Strike] = []
        for fault in faults:
            if fault.id in self._struck:
                continue
            self._struck.add(fault.id)
            at = self._reached.get(fault.id)
            node: NodeId | None = fault.node if fault.node is not None else at.node if at else None
            rank: Rank | None = fault.rank if fault.rank is not None else at.rank if at else None
            if node is None:
                continue
            content: dict[str, Any] = fault.to_dict()
            due.append(Strike(fault=content, node=node, rank=rank))
        if not self._operators:
            self._waiting.extend(due)
            return []
        return due


def _name(fault: FaultSpec) -> str:
    return f"{fault.step}/{fault.phase}"
