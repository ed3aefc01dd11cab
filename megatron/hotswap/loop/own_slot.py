"""The rank's own sealed slot of the version that its live tensors hold: read to restore from, written again if spoilt.

What a slot holds is checked whenever it is read: by the replicator that streams it, and by the worker that restores
from it. Whoever finds it bad voids it, so that nobody reads it any more. As long as the live tensors still hold the
version, which they do up to the next optimizer step, the worker writes it again; otherwise the coordinator is told,
and plans with what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_ext.control.session import WorkerSession
from deadpool_ext.protocol.messages import SlotCorrupt
from deadpool_ext.protocol.types import Version
from deadpool_ext.replication.arena import SealedSlot, Segment
from deadpool_ext.replication.copy import CopyEngine, Ticket
from deadpool_ext.replication.errors import CorruptSlotError, SlotStateError
from megatron.hotswap.state.shards import FlatShards


@dataclass(frozen=True, slots=True)
class Saved:
    """What was read from a slot. ``shard`` is None where only the metadata was asked for."""

    shard: memoryview | None
    meta: memoryview


class OwnSlot:
    """One rank's own slot of ``version``. Main thread only."""

    def __init__(self, session: WorkerSession, segment: Segment, engine: CopyEngine, shards: FlatShards) -> None:
        self.version = Version(v=-1, lineage=-1)
        self._session = session
        self._segment = segment
        self._engine = engine
        self._shards = shards
        self._meta = b""
        self._shard_crc = 0
        self._changes = -1

    def sealed(self, slot: SealedSlot, meta: bytes) -> None:
        """The live tensors hold what was sealed in ``slot``."""
        self.version, self._meta, self._shard_crc = slot.version, meta, slot.shard_crc

    def read(self, version: Version, *, shard: bool) -> Saved:
        """Verified content of a version (INV-2). Where it is no good, the coordinator is told and the slot is void.

        Raises CorruptSlotError; a slot that somebody else found bad since the plan was made counts as such.
        """
        segment = self._segment
        slot = segment.find(version)
        try:
            if slot is None:
                raise SlotStateError("the slot is not sealed any more")
            if not shard:
                saved = Saved(None, segment.read_meta(version))
            else:
                views = segment.read(version)
                saved = Saved(views.shard, views.meta)
        except (CorruptSlotError, SlotStateError) as error:
            if slot is not None:
                segment.void(slot)
            self._report(version, str(error))
            raise CorruptSlotError(segment.rank, version, str(error)) from error
        self.sealed(slot, bytes(saved.meta))
        return saved

    def start_mending(self) -> Ticket | None:
        """If the slot was voided by somebody who read it, start to write it again; costs one load where nothing
        happened. To be called only while the live tensors hold the version. Hand the ticket to :meth:`mended`."""
        changes = self._segment.changes()
        if changes == self._changes:
            return None
        self._changes = changes
        if self.version.v < 0 or self._segment.find(self.version) is not None:
            return None
        return self._engine.start(self._segment, self.version, self._shards.sources())

    def mended(self, ticket: Ticket) -> None:
        """The bytes are in place: seal them if they are what was sealed before.

        Raises CorruptSlotError, and tells the coordinator, if the live tensors do not hold that any more either.
        """
        if ticket.shard_crc != self._shard_crc:
            ticket.abandon()
            detail = "the slot was found corrupt, and the live tensors differ from what had been sealed"
            self._report(self.version, detail)
            raise CorruptSlotError(self._segment.rank, self.version, detail)
        slot = ticket.finish(self._meta)
        reason = f"the slot of iteration {slot.version.v} was found corrupt and is written again from the live tensors"
        self._session.emit("warning", kind="slot_rewritten", reason=reason, version=slot.version.v)

    def _report(self, version: Version, detail: str) -> None:
        self._session.send(
            SlotCorrupt(generation=self._session.generation, rank=self._session.rank, version=version, detail=detail)
        )
