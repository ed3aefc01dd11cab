"""What a replicator answers in a generation: replica streams, DONE messages, and fetch requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

from deadpool_ext.replication import agreement as agreeing
from deadpool_ext.replication.arena import Segment
from deadpool_ext.replication.commands import Hosted
from deadpool_ext.replication.errors import CorruptSlotError, CorruptTransferError, ProtocolError
from deadpool_ext.replication.generation import Generation
from deadpool_ext.replication.slot_stream import held, receive_slot, send_slot
from deadpool_ext.replication.transport import frame
from deadpool_ext.replication.transport.frame import FrameKind, Header, Refusal
from deadpool_ext.replication.transport.handshake import Hello, Purpose
from deadpool_ext.replication.transport.tcp import Channel


async def serve(generation: Generation, channel: Channel, hello: Hello) -> None:
    """Serve an admitted connection until it ends. Raises CONNECTION_FAILURES, at the latest at its end."""
    match hello.purpose:
        case Purpose.STREAM:
            await _serve_stream(generation, channel, hello)
        case Purpose.DONE:
            await _serve_done(generation, channel, hello)
        case Purpose.FETCH:
            await _serve_fetch(generation, channel)


async def _receive(generation: Generation, channel: Channel, kind: FrameKind) -> Header:
    header = await channel.receive(idle=True)
    if header.kind is not kind or header.generation != generation.number:
        raise ProtocolError(f"{header.kind.name} of generation {header.generation} on a {kind.name} connection")
    return header


async def _refuse(channel: Channel, header: Header, reason: Refusal) -> None:
    await channel.send(replace(header, kind=FrameKind.REFUSE, offset=0, nbytes=0, crc=0, aux=reason))


async def _serve_stream(generation: Generation, channel: Channel, hello: Hello) -> None:
    await generation.take_over(hello.rank)
    while True:
        offer = await _receive(generation, channel, FrameKind.OFFER)
        segment = generation.hosted.get(offer.rank)
        if segment is None or offer.rank != hello.rank:
            await _refuse(channel, offer, Refusal.NOT_HOSTED)
            continue
        if (offer.layout_digest, offer.nbytes) != (segment.spec.layout_digest, segment.spec.shard_bytes):
            await _refuse(channel, offer, Refusal.LAYOUT)
            text = f"rank {offer.rank} was offered with another layout than declared"
            generation.problem("layout", text, rank=offer.rank, version=offer.version, peer=hello.node)
            continue
        if not await _intact(generation, segment, offer):
            started = time.monotonic()
            await channel.send(replace(offer, kind=FrameKind.GO))
            try:
                sealed = await receive_slot(channel, segment, offer)
            except CorruptTransferError:
                with contextlib.suppress(OSError):  # the sender may be gone; it starts again either way
                    await _refuse(channel, offer, Refusal.CORRUPT)
                raise
            generation.say(
                Hosted(
                    generation=generation.number,
                    rank=offer.rank,
                    version=offer.version,
                    nbytes=segment.spec.shard_bytes + sealed.meta_bytes,
                    seconds=time.monotonic() - started,
                )
            )
        await channel.send(replace(offer, kind=FrameKind.ACK))


async def _intact(generation: Generation, segment: Segment, offer: Header) -> bool:
    """Whether what is offered is here already, and still is what its checksum says: a replica that is counted on for
    another generation has lain in memory for a while."""
    slot = held(segment, offer)
    if slot is None:
        return False
    if await asyncio.to_thread(segment.verify, slot):
        return True
    segment.void(slot)
    text = f"rank {offer.rank}: a replica of version {offer.version.v} does not match its checksum any more"
    generation.problem("corrupt_slot", text, rank=offer.rank, version=offer.version)
    return False


async def _serve_done(generation: Generation, channel: Channel, hello: Hello) -> None:
    while True:
        done = await _receive(generation, channel, FrameKind.DONE)
        generation.apply(agreeing.PeerDone(node=hello.node, generation=done.generation, version=done.version))


async def _serve_fetch(generation: Generation, channel: Channel) -> None:
    """A replica that is hosted here, or an own slot, whichever there is of exactly this version."""
    while True:
        wanted = await _receive(generation, channel, FrameKind.FETCH)
        for segment in (generation.hosted.get(wanted.rank), generation.own.get(wanted.rank)):
            slot = segment.find(wanted.version) if segment is not None else None
            if segment is not None and slot is not None:
                break
        else:
            await _refuse(channel, wanted, Refusal.NOT_FOUND)
            continue
        offer = frame.offer(generation.number, wanted.rank, slot, segment.spec.shard_bytes)
        await channel.send(offer)
        try:
            await send_slot(channel, segment, slot, offer)
        except CorruptSlotError as error:
            segment.void(slot)
            generation.problem("corrupt_slot", str(error), rank=wanted.rank, version=wanted.version)
