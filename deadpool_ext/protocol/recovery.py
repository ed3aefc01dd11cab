"""The progress of one recovery, from the first failure to the first step that is new."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deadpool_ext.protocol.messages import FenceAck, StoreReady
from deadpool_ext.protocol.records import Failure
from deadpool_ext.protocol.types import NodeId, Rank, RecoveryPlan, SourceKind


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Progress and times (monotonic seconds). A failure on the way restarts it under a newer generation."""

    generation: int
    failed_at: float  # the injection where there was one, else the detection
    detected_at: float
    first_fence_at: float
    fence_at: float  # of the current generation
    failures: list[Failure] = field(default_factory=list)
    completed: int = -1  # the highest iteration completed before; the first one above it is new
    planned: str = ""  # what moves, where nobody failed
    done: bool = False  # the first new step was seen
    redundant: bool = False  # the target is committed again

    # Progress within the current generation.
    fencing: set[NodeId] = field(default_factory=set)  # nodes that must acknowledge
    aborted: set[NodeId] = field(default_factory=set)
    acks: dict[NodeId, FenceAck] = field(default_factory=dict)
    new_workers: set[Rank] = field(default_factory=set)
    plan: RecoveryPlan | None = None
    store: StoreReady | None = None
    constructed: set[Rank] = field(default_factory=set)
    fetched: set[Rank] = field(default_factory=set)
    rebuilt: set[Rank] = field(default_factory=set)
    restored: set[Rank] = field(default_factory=set)
    digests: dict[Rank, str] = field(default_factory=dict)
    committed: set[NodeId] = field(default_factory=set)
    fetched_bytes: int = 0
    restored_bytes: int = 0
    marks: dict[str, float] = field(default_factory=dict)

    def restart(self, generation: int, now: float) -> None:
        """Begin again under a newer generation; what it is measured from stays."""
        fresh = Recovery(generation=generation, failed_at=now, detected_at=now, first_fence_at=now, fence_at=now)
        kept = ("failed_at", "detected_at", "first_fence_at", "failures", "completed", "planned", "done")
        for name in self.__dataclass_fields__:
            if name not in kept:
                setattr(self, name, getattr(fresh, name))

    @property
    def replica_seats(self) -> set[Rank]:
        """Seats of the plan whose state is fetched from another node."""
        return {seat.rank for seat in self.plan.seats if seat.source is SourceKind.REPLICA} if self.plan else set()

    @property
    def sources(self) -> dict[str, int]:
        """Number of seats by where their state comes from."""
        counts = Counter(seat.source.value for seat in self.plan.seats) if self.plan else Counter[str]()
        return dict(sorted(counts.items()))

    @property
    def steps_replayed(self) -> int:
        """Completed iterations above the target, which are computed again (INV-6)."""
        return max(0, self.completed - self.plan.target.v) if self.plan else 0

    def seconds(self, end: float) -> dict[str, float]:
        """Seconds by phase; they add up to ``total``.

        ``superseded`` (only if a failure hit during the recovery): from the first fence to the last one. ``rebuild``
        spans newcomers' set-up, fetches and the connecting of groups; :meth:`within_rebuild` takes it apart.
        """
        steps = [
            ("detect", self.detected_at),
            ("classify", self.first_fence_at),
            ("superseded", self.fence_at),
            ("fence", self.marks.get("aborted", self.fence_at)),
            ("unwind", self.marks.get("unwound", self.fence_at)),
            ("plan", self.marks.get("planned", self.fence_at)),
            ("rebuild", self.marks.get("rebuilt", self.fence_at)),
            ("restore", self.marks.get("restored", self.fence_at)),
            ("resume", end),
        ]
        seconds: dict[str, float] = {}
        since = self.failed_at
        for name, until in steps:
            until = max(until, since)
            if name != "superseded" or until > since:
                seconds[name] = round(until - since, 6)
            since = until
        seconds["total"] = round(since - self.failed_at, 6)
        return seconds

    def within_rebuild(self) -> dict[str, float]:
        """Seconds after the plan at which each thing that the rendezvous waits for was there, and the connecting."""
        planned = self.marks.get("planned", self.fence_at)
        waits: dict[str, float] = {
            name: round(max(0.0, self.marks[name] - planned), 6)
            for name in ("store", "constructed", "fetched")
            if name in self.marks
        }
        if "rebuilt" in self.marks:
            waits["connect"] = round(self.marks["rebuilt"] - self.marks["rendezvous"], 6)
        return waits
