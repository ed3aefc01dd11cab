"""What an agent and its replicator say to each other over their socket pair: frozen values, length-prefixed msgpack.

Every command names its generation; one that is older than what the replicator already lives in has no effect (INV-4)
and gets no answer.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from deadpool_ext.protocol.messages import NodeAddress
from deadpool_ext.protocol.types import ShardSpec, Version
from deadpool_ext.replication.errors import ProtocolError

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 16 * 2**20

# ---- agent -> replicator -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Configure:
    """Live in ``generation``: open these segments, void what is above ``void_above``, stream and agree.

    Ends whatever ran before. Answered by :class:`Configured`, or :class:`Problem` of kind ``configure``.
    """

    generation: int
    specs: tuple[ShardSpec, ...]  # of every rank named in own and hosted
    own: dict[int, str]  # rank -> segment path
    hosted: dict[int, str]  # rank -> path of the segment that receives its replica
    targets: dict[int, tuple[NodeAddress, ...]]  # own rank -> nodes that must hold its replica
    members: tuple[NodeAddress, ...]  # all nodes with seats, this one included: their agreement is a commit
    board_path: str
    void_above: Version | None = None
    faults: tuple[dict[str, Any], ...] = ()  # parsed fault specs; those of phase h2h matter here
    no_progress_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Freeze:
    """``generation`` begins: close everything older and stop writing into slots, then answer :class:`Frozen`."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """Bring a sealed version of ``rank`` from another node into a segment of this one (usually the rank's own)."""

    generation: int
    rank: int
    version: Version
    source: NodeAddress
    segment_path: str
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DropConnections:
    """Fault injection: break every connection of this generation once; they come back by themselves."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AddFault:
    """Fault injection: streams of this generation watch for one more fault (a parsed spec)."""

    fault: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOver:
    """Fault injection: a stream that stands at this fault goes on."""

    fault_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Exit."""


# ---- replicator -> agent -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Configured:
    """The replicator lives in this generation now."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """Nothing older than ``generation`` writes into any slot any more, and no connection of it is open."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchDone:
    """The version is verified and sealed in the segment. ``nbytes`` 0: it was there already."""

    generation: int
    rank: int
    version: Version
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchFailed:
    """The version did not come. ``corrupt``: the source's copy does not match its checksum, so plan without it."""

    generation: int
    rank: int
    version: Version
    reason: str
    corrupt: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedSeen:
    """All members agreed; the board shows it."""

    generation: int
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSealed:
    """``target`` acknowledged a replica of an own rank. ``nbytes`` 0: it had this version already."""

    generation: int
    rank: int
    version: Version
    target: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosted:
    """A replica of another node's rank was received, verified and sealed here."""

    generation: int
    rank: int
    version: Version
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPointReached:
    """The stream of ``rank`` stands half-way at an armed fault (phase h2h) and waits there to be hit from outside."""

    generation: int
    fault_id: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something an operator should know; the replicator goes on. Each distinct one is said once a generation.

    ``kind``: ``agreement`` (INV-1 would break: nothing more is committed), ``authentication``, ``configure``,
    ``corrupt_slot`` (a sealed slot of this node went bad; it is void now), ``corrupt_transfer`` (dropped, and sent
    again), ``layout``, ``no_progress``, ``refused``, ``slot``, ``stale`` (a peer was fenced before this node: normal
    for a moment), ``unreachable``.
    """

    kind: str
    text: str
    generation: int
    rank: int | None = None
    version: Version | None = None
    peer: str | None = None


Command = Configure | Freeze | Fetch | DropConnections | AddFault | FaultOver | Stop
Reply = (
    Configured | Frozen | FetchDone | FetchFailed | CommittedSeen | ReplicaSealed | Hosted | FaultPointReached | Problem
)
Message = Command | Reply


class _Envelope(msgspec.Struct, frozen=True):
    name: str
    body: msgspec.Raw


_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Configure, Freeze, Fetch, DropConnections, AddFault, FaultOver, Stop),
        *(Configured, Frozen, FetchDone, FetchFailed, CommittedSeen),
        *(ReplicaSealed, Hosted, FaultPointReached, Problem),
    )
}
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(kind) for name, kind in _TYPES.items()
}
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Message) -> bytes:
    """One frame: length and body."""
    body = msgspec.msgpack.encode({"name": type(message).__name__, "body": message})
    if len(body) > _MAX_BYTES:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Inverse of :func:`encode` without the length. Raises :class:`ProtocolError`."""
    try:
        envelope = _ENVELOPE.decode(body)
        decoder = _DECODERS.get(envelope.name)
        if decoder is None:
            raise ProtocolError(f"unknown message {envelope.name!r}")
        message: Message = decoder.decode(envelope.body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed message: {error}") from error
    return message


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next message, or None at the end of the stream (also in the middle of a frame: the other side died)."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > _MAX_BYTES:
            raise ProtocolError(f"a message of {length} bytes")
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
