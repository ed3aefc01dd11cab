"""What a replicator sends in a generation: own slots to their targets, DONE to the other members, and fetches."""

from __future__ import annotations

import asyncio
import time

from deadpool_ext.protocol.messages import NodeAddress
from deadpool_ext.protocol.types import Version
from deadpool_ext.replication import agreement as agreeing
from deadpool_ext.replication.arena import SealedSlot, Segment
from deadpool_ext.replication.commands import FaultPointReached, Fetch, FetchDone, FetchFailed, ReplicaSealed
from deadpool_ext.replication.errors import (
    CorruptSlotError,
    CorruptTransferError,
    NoProgressError,
    NotReadyError,
    ProtocolError,
)
from deadpool_ext.replication.generation import CONNECTION_FAILURES, Backoff, Generation
from deadpool_ext.replication.slot_stream import CorruptSourceError, receive_slot, send_slot
from deadpool_ext.replication.transport import frame
from deadpool_ext.replication.transport.frame import FrameKind, Header, Refusal
from deadpool_ext.replication.transport.handshake import Purpose
from deadpool_ext.replication.transport.tcp import Channel

_CORRUPT_TRIES = 3


class _Reachability:
    """Says once, after ``no_progress_s`` without any connection, that a peer cannot be reached."""

    def __init__(self, generation: Generation, peer: NodeAddress) -> None:
        self._generation = generation
        self._peer = peer
        self._since: float | None = None

    def connected(self) -> None:
        self._since = None

    def failed(self, error: Exception) -> None:
        now = time.monotonic()
        self._since = self._since if self._since is not None else now
        if now - self._since > self._generation.configure.no_progress_s:
            text = f"no connection to {self._peer.host}:{self._peer.port} for {now - self._since:.0f} s: {error!r}"
            self._generation.problem("unreachable", text, peer=self._peer.node)
            self._since = now


async def stream_rank(generation: Generation, rank: int, target: NodeAddress) -> None:
    """Bring the newest sealed slot of an own rank to one target, for as long as the generation lasts."""
    backoff = Backoff()
    reachability = _Reachability(generation, target)
    sent: SealedSlot | None = None
    while True:
        channel: Channel | None = None
        try:
            channel = await generation.connect(target, Purpose.STREAM, rank)
            reachability.connected()
            while True:
                slot = generation.newest(rank, sent)
                if slot is None:
                    await generation.sealed[rank].wait()
                    continue
                await _send(generation, channel, rank, target.node, slot)
                sent = slot
                backoff.reset()
        except CorruptSlotError as error:
            slot = generation.own[rank].find(error.version)
            if slot is not None:
                generation.own[rank].void(slot)
            generation.problem("corrupt_slot", str(error), rank=rank, version=error.version)
        except CONNECTION_FAILURES as error:
            if channel is None:
                reachability.failed(error)
            generation.report(error, peer=target.node, rank=rank)
        finally:
            if channel is not None:
                generation.release(channel)
        await backoff.pause()


async def _send(generation: Generation, channel: Channel, rank: int, target: str, slot: SealedSlot) -> None:
    """Offer one slot and send it if it is wanted; returns once it is acknowledged."""
    started = time.monotonic()
    segment = generation.own[rank]
    offer = frame.offer(generation.number, rank, slot, segment.spec.shard_bytes)

    async def after_chunk(version: Version) -> None:
        await _fault_point(generation, rank, version)

    await channel.send(offer)
    reply = await channel.receive()
    nbytes = 0
    if reply.kind is FrameKind.GO:
        nbytes = await send_slot(channel, segment, slot, offer, after_chunk)
        reply = await channel.receive()
    if reply.kind is FrameKind.REFUSE:
        raise ProtocolError(f"{target} refused rank {rank}, version {slot.version.v}: {_reason(reply)}")
    if reply.kind is not FrameKind.ACK or (reply.rank, reply.version) != (rank, slot.version):
        raise ProtocolError(f"{target} answered {reply.kind.name} to rank {rank}, version {slot.version.v}")
    generation.say(
        ReplicaSealed(
            generation=generation.number,
            rank=rank,
            version=slot.version,
            target=target,
            nbytes=nbytes,
            seconds=time.monotonic() - started,
        )
    )
    generation.apply(agreeing.ReplicaAcked(rank=rank, node=target, version=slot.version))


async def _fault_point(generation: Generation, rank: int, version: Version) -> None:
    """If a fault is armed here, say so once and stand still until it was carried out, maybe on this process."""
    for fault in tuple(generation.faults):
        if fault.get("phase") != "h2h" or fault.get("step") != version.v or fault["id"] in generation.fired_faults:
            continue
        if fault.get("node") != generation.node and fault.get("rank") != rank:
            continue
        over = generation.fired_faults[fault["id"]] = asyncio.Event()
        generation.say(FaultPointReached(generation=generation.number, fault_id=fault["id"], rank=rank))
        await over.wait()  # or until the generation ends


async def tell_done(generation: Generation, peer: NodeAddress) -> None:
    """Keep one member informed of what this node is done with; said again on every new connection."""
    backoff = Backoff()
    reachability = _Reachability(generation, peer)
    while True:
        channel: Channel | None = None
        try:
            channel = await generation.connect(peer, Purpose.DONE)
            backoff.reset()
            reachability.connected()
            generation.apply(agreeing.PeerConnected(node=peer.node))
            await _tell(generation, channel, peer.node)
        except CONNECTION_FAILURES as error:
            if channel is None:
                reachability.failed(error)
            generation.report(error, peer=peer.node)
        finally:
            if channel is not None:
                generation.release(channel)
        await backoff.pause()


async def _tell(generation: Generation, channel: Channel, peer: str) -> None:
    """Send as it becomes due. Reads as well: only the end of the connection tells that something said is lost."""
    ending = asyncio.ensure_future(channel.receive(idle=True))
    try:
        while not ending.done():
            version = generation.done_to_send.pop(peer, None)
            if version is not None:
                done = Header(
                    kind=FrameKind.DONE, generation=generation.number, rank=0, version=version, layout_digest=""
                )
                await channel.send(done)
                continue
            due = asyncio.ensure_future(generation.done_due[peer].wait())
            try:
                await asyncio.wait([due, ending], return_when=asyncio.FIRST_COMPLETED)
            finally:
                due.cancel()
        raise ProtocolError(f"{peer} answered {ending.result().kind.name} to DONE")
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)


async def fetch(generation: Generation, command: Fetch) -> None:
    """Carry out a Fetch command; always answers, unless the generation ends first."""
    started = time.monotonic()

    def failed(reason: str, corrupt: bool = False) -> None:
        generation.say(
            FetchFailed(
                generation=generation.number,
                rank=command.rank,
                version=command.version,
                reason=reason,
                corrupt=corrupt,
            )
        )

    if command.rank in generation.fetching:
        failed("another fetch of this rank is under way")
        return
    generation.fetching.add(command.rank)
    segment: Segment | None = None
    try:
        segment = Segment.open(command.segment_path)
        async with asyncio.timeout(command.timeout_s):
            nbytes = await _fetch(generation, command, segment)
    except TimeoutError:
        failed(f"not fetched from {command.source.node} within {command.timeout_s} s")
    except CorruptSourceError as error:
        failed(str(error), corrupt=True)
    except CONNECTION_FAILURES as error:
        failed(str(error))
    else:
        generation.say(
            FetchDone(
                generation=generation.number,
                rank=command.rank,
                version=command.version,
                nbytes=nbytes,
                seconds=time.monotonic() - started,
            )
        )
    finally:
        generation.fetching.discard(command.rank)
        if segment is not None:
            segment.close()


async def _fetch(generation: Generation, command: Fetch, segment: Segment) -> int:
    """Bytes received, 0 if a verified copy was here. Tries again while the source is not ready or breaks off."""
    present = segment.find(command.version)
    if present is not None:
        if await asyncio.to_thread(segment.verify, present):
            return 0
        segment.void(present)
        text = f"rank {command.rank}: a sealed slot of this node does not match its checksum"
        generation.problem("corrupt_slot", text, rank=command.rank, version=command.version)
    backoff = Backoff()
    corrupt = 0
    while True:
        channel: Channel | None = None
        try:
            channel = await generation.connect(command.source, Purpose.FETCH, command.rank)
            return await _fetch_once(generation, command, segment, channel)
        except CorruptTransferError as error:
            corrupt += 1
            generation.report(error, peer=command.source.node, rank=command.rank, version=command.version)
            if corrupt == _CORRUPT_TRIES:
                raise
        except (NotReadyError, NoProgressError, OSError) as error:
            generation.report(error, peer=command.source.node, rank=command.rank, version=command.version)
        finally:
            if channel is not None:
                generation.release(channel)
        await backoff.pause()


async def _fetch_once(generation: Generation, command: Fetch, segment: Segment, channel: Channel) -> int:
    await channel.send(
        Header(
            kind=FrameKind.FETCH,
            generation=generation.number,
            rank=command.rank,
            version=command.version,
            layout_digest=segment.spec.layout_digest,
        )
    )
    offer = await channel.receive()
    if offer.kind is FrameKind.REFUSE:
        raise ProtocolError(f"{command.source.node} has no such copy: {_reason(offer)}")
    if offer.kind is not FrameKind.OFFER or (offer.rank, offer.version) != (command.rank, command.version):
        raise ProtocolError(f"{command.source.node} answered {offer.kind.name} to a fetch")
    sealed = await receive_slot(channel, segment, offer)
    return segment.spec.shard_bytes + sealed.meta_bytes


def _reason(header: Header) -> str:
    try:
        return Refusal(header.aux).name.lower()
    except ValueError:
        return f"reason {header.aux}"
