"""The node's shared memory, owned by its agent: the board, its seats' segments, and the replicas it hosts."""

from __future__ import annotations

from deadpool_ext.control.agent_events import EnsureSegments
from deadpool_ext.protocol.types import Rank, ShardSpec, SlotInfo, Version
from deadpool_ext.replication.arena import Segment
from deadpool_ext.replication.board import Board


class NodeMemory:
    """Creates, voids, inventories and drops segments. :meth:`ensure` may take seconds (it allocates every page)."""

    def __init__(self) -> None:
        self.board = Board.create()
        self.own: dict[Rank, Segment] = {}
        self.hosted: dict[Rank, Segment] = {}

    def ensure(self, wanted: EnsureSegments) -> None:
        """Create what is missing, drop hosted segments not named. Raises ArenaMemoryError."""
        _create_missing(self.own, wanted.own)
        keep = {spec.rank for spec in wanted.hosted}
        for rank in [rank for rank in self.hosted if rank not in keep]:
            self.hosted.pop(rank).close()
        _create_missing(self.hosted, wanted.hosted)

    def drop(self) -> None:
        """Give every segment back."""
        for segment in (*self.own.values(), *self.hosted.values()):
            segment.close()
        self.own.clear()
        self.hosted.clear()

    def void_above(self, version: Version) -> None:
        """Void all slots above a recovery's target. Only while nobody writes: workers unwound, replicator frozen."""
        for segment in (*self.own.values(), *self.hosted.values()):
            segment.reset_writing()
            segment.void_above(version)

    def reset_hosted(self) -> None:
        """Empty hosted slots left half-written. Only while no replicator lives: it is their one writer."""
        for segment in self.hosted.values():
            segment.reset_writing()

    def inventory(self) -> tuple[tuple[SlotInfo, ...], tuple[SlotInfo, ...]]:
        """Sealed slots: (own, hosted)."""
        return _sealed(self.own), _sealed(self.hosted)

    def flip_bit(self, rank: Rank, *, hosted: bool, bit: int | None = None) -> Version | None:
        """Fault injection: flip one bit of the newest sealed slot of a rank, own or hosted; the version hit, or None
        where there is none. ``bit``: see :meth:`Segment.flip_bit`; by default one in the middle of the shard."""
        segment = (self.hosted if hosted else self.own).get(rank)
        slot = segment.newest() if segment is not None else None
        if segment is None or slot is None:
            return None
        segment.flip_bit(slot, segment.spec.shard_bytes * 4 if bit is None else bit)
        return slot.version

    def close(self) -> None:
        """Give everything back."""
        self.drop()
        self.board.close()


def _create_missing(segments: dict[Rank, Segment], specs: tuple[ShardSpec, ...]) -> None:
    for spec in specs:
        if spec.rank not in segments:
            segments[spec.rank] = Segment.create(spec)


def _sealed(segments: dict[Rank, Segment]) -> tuple[SlotInfo, ...]:
    return tuple(slot for _, segment in sorted(segments.items()) for slot in segment.sealed())
