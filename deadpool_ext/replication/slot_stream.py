"""A sealed slot on its way from one segment to another: chunked, checksummed on both sides, sealed only when whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from deadpool_ext import _native
from deadpool_ext.protocol.types import Version
from deadpool_ext.replication.arena import SealedSlot, Segment
from deadpool_ext.replication.errors import (
    CorruptSlotError,
    CorruptTransferError,
    ProtocolError,
    SlotStateError,
    TransferError,
)
from deadpool_ext.replication.transport import frame
from deadpool_ext.replication.transport.frame import CHUNK_BYTES, FrameKind, Header
from deadpool_ext.replication.transport.tcp import Channel

ChunkHook = Callable[[Version], Awaitable[None]]


class CorruptSourceError(TransferError):
    """The sender found its own copy to be bad and said so."""


class _Part:
    """Shard or metadata of one transfer: how far it is, and the checksum so far."""

    def __init__(self, kind: FrameKind, view: memoryview) -> None:
        self.kind = kind
        self.view = view
        self.at = 0
        self.crc = 0

    def complete(self) -> bool:
        return self.at == self.view.nbytes

    def next(self) -> memoryview:
        return self.view[self.at : self.at + CHUNK_BYTES]

    def advance(self, nbytes: int, crc: int) -> None:
        """The checksum of the whole follows from those of the chunks: no second pass over the memory."""
        self.crc = _native.crc32c_combine(self.crc, crc, nbytes)
        self.at += nbytes


async def send_slot(
    channel: Channel, segment: Segment, slot: SealedSlot, offer: Header, after_chunk: ChunkHook | None = None
) -> int:
    """Send shard and metadata of a sealed slot that was offered with ``offer``; returns the bytes sent.

    Raises :class:`CorruptSlotError` if the memory does not match the slot's checksum (the receiver is told),
    :class:`SlotStateError` if the slot changed hands on the way, and what the channel raises.
    """
    views = segment.views(slot)
    for part, sealed_crc in (
        (_Part(FrameKind.CHUNK, views.shard), slot.shard_crc),
        (_Part(FrameKind.META, views.meta), slot.meta_crc),
    ):
        while not part.complete():
            payload = part.next()
            crc = _native.crc32c(payload)
            if not segment.unchanged(slot):
                raise SlotStateError(f"rank {segment.rank}: version {slot.version} was replaced while it was sent")
            at = part.at
            part.advance(payload.nbytes, crc)
            if part.complete() and part.crc != sealed_crc:
                await channel.send(replace(offer, kind=FrameKind.CORRUPT, offset=0, nbytes=0))
                raise CorruptSlotError(segment.rank, slot.version, "a sealed slot no longer matches its checksum")
            await channel.send(replace(offer, kind=part.kind, offset=at, nbytes=payload.nbytes, crc=crc), payload)
            if after_chunk is not None:
                await after_chunk(slot.version)
    return views.shard.nbytes + views.meta.nbytes


async def receive_slot(channel: Channel, segment: Segment, offer: Header) -> SealedSlot:
    """Receive an offered slot into a free one of ``segment``, verify it and seal it.

    Whatever goes wrong, and if the task is cancelled, the slot is given back and every sealed one is untouched.
    Raises :class:`CorruptTransferError`, :class:`CorruptSourceError`, :class:`ProtocolError`,
    :class:`SlotStateError` (no free slot, INV-3), and what the channel raises.
    """
    spec = segment.spec
    if (offer.layout_digest, offer.nbytes) != (spec.layout_digest, spec.shard_bytes):
        raise ProtocolError(f"rank {segment.rank}: layout {offer.layout_digest}, {offer.nbytes} bytes do not fit")
    if offer.offset > spec.meta_capacity:
        raise ProtocolError(f"rank {segment.rank}: {offer.offset} bytes of metadata exceed {spec.meta_capacity}")
    index = segment.begin(offer.version)
    sealed: SealedSlot | None = None
    try:
        views = segment.writable(index)
        shard = _Part(FrameKind.CHUNK, views.shard)
        meta = _Part(FrameKind.META, views.meta[: offer.offset])
        while not (shard.complete() and meta.complete()):
            await _receive_chunk(channel, meta if shard.complete() else shard, offer)
        if (shard.crc, meta.crc) != (offer.crc, offer.aux):
            raise CorruptTransferError(f"rank {segment.rank}: version {offer.version} does not match its checksum")
        sealed = segment.seal_written(index, offer.offset, offer.crc, offer.aux)
        return sealed
    finally:
        if sealed is None:
            segment.abandon(index)


async def _receive_chunk(channel: Channel, part: _Part, offer: Header) -> None:
    header = await channel.receive()
    if (header.generation, header.rank, header.version) != (offer.generation, offer.rank, offer.version):
        raise ProtocolError(f"a frame of another transfer: {header}")
    if header.kind is FrameKind.CORRUPT:
        raise CorruptSourceError(f"the sender's copy of rank {offer.rank}, version {offer.version} is bad")
    expected = part.next()
    if (header.kind, header.offset, header.nbytes) != (part.kind, part.at, expected.nbytes):
        raise ProtocolError(f"expected {part.kind.name} at {part.at}, got {header.kind.name} at {header.offset}")
    await channel.receive_into(expected)
    crc = _native.crc32c(expected)
    if crc != header.crc:
        raise CorruptTransferError(f"rank {offer.rank}: {part.kind.name} at {part.at} does not match its checksum")
    part.advance(expected.nbytes, crc)


def held(segment: Segment, offer: Header) -> SealedSlot | None:
    """The slot in which exactly what is offered is sealed here already; its content is not looked at."""
    slot = segment.find(offer.version)
    if slot is None or frame.offer(offer.generation, offer.rank, slot, segment.spec.shard_bytes) != offer:
        return None
    return slot
