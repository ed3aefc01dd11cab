"""What the job remembers for its files: finished iterations, processes, failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.messages import TrainingFinished, WorkerSeated
from deadpool_ext.protocol.types import NodeId, Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One thing that went wrong, and what was concluded. ``permanent``: the node is given up."""

    kind: str  # node_lost | worker_exited | hang | collective_failed | copy_failed | parameters_differ | deadline
    reason: str
    permanent: bool
    evidence: str
    detected_at: float  # monotonic seconds
    node: NodeId | None = None
    rank: Rank | None = None
    blameless: bool = False  # caused from outside (a lost node): says nothing about whether going on makes sense

    @property
    def restarts_worker(self) -> bool:
        """Whether the worker of ``rank`` is forked again on its own node."""
        return self.rank is not None and self.kind in ("worker_exited", "hang")


@dataclass(slots=True)
class StepLedger:
    """Finished iterations, each once per generation that computed it."""

    highest: int = -1
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def add(self, record: dict[str, Any], generation: int) -> dict[str, Any] | None:
        """The line to write, or None for one that is known (a newcomer repeats those it restored).

        ``generation`` is the sender's; a ``generation`` inside the record is the one that computed the iteration and
        wins.
        """
        line = {"generation": generation, **record}
        key = (int(line["iteration"]), int(line["generation"]))
        if key in self._seen:
            return None
        self._seen.add(key)
        self.highest = max(self.highest, key[0])
        return line


@dataclass(slots=True)
class SeatBook:
    """Per seat: the process at the start, the process at the end, and what it ended with."""

    start: dict[Rank, dict[str, Any]] = field(default_factory=dict)
    end: dict[Rank, dict[str, Any]] = field(default_factory=dict)
    finished: dict[Rank, TrainingFinished] = field(default_factory=dict)

    def seated(self, node: NodeId, message: WorkerSeated) -> None:
        """A process took a seat."""
        process = {"pid": message.pid, "start_ticks": message.start_ticks, "node": node}
        self.start.setdefault(message.rank, process)
        self.end[message.rank] = process

    def to_list(self, seat_nodes: list[NodeId]) -> list[dict[str, Any]]:
        """``final.json``'s ``seats``, ordered by rank."""
        return [
            {
                "rank": rank,
                "node": node,
                "digests": self.finished[rank].digests if rank in self.finished else {},
                "process_start": self.start.get(rank),
                "process_end": self.end.get(rank),
            }
            for rank, node in enumerate(seat_nodes)
        ]
