"""The fixed header before every frame between replicators, checksummed itself. Little-endian.

A stream:  OFFER -> GO | ACK (already here) | REFUSE;  CHUNK... META -> ACK | REFUSE.
A fetch:   FETCH -> REFUSE | OFFER;  CHUNK... META | CORRUPT.
Agreement: DONE, DONE, ...
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from deadpool_ext import _native
from deadpool_ext.protocol.types import Version
from deadpool_ext.replication.arena import SealedSlot
from deadpool_ext.replication.errors import CorruptTransferError, ProtocolError

CHUNK_BYTES = 4 * 2**20
_MAGIC = int.from_bytes(b"DPF1", "little")
_HEADER = struct.Struct("<IIQQQI16sQQII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


class FrameKind(enum.IntEnum):
    """What a frame says."""

    OFFER = 1  # nbytes: of the shard, offset: of the metadata, crc: of the shard, aux: of the metadata
    GO = 2  # send it
    CHUNK = 3  # nbytes of payload at offset of the shard, crc: of the payload
    META = 4  # the same, of the metadata
    ACK = 5  # verified and sealed here
    REFUSE = 6  # aux: a Refusal
    DONE = 7  # the sender's node is done with this version
    FETCH = 8  # send me this rank's version
    CORRUPT = 9  # instead of a CHUNK or META: the sender's own copy turned out bad


class Refusal(enum.IntEnum):
    """Why a frame was refused."""

    NOT_HOSTED = 1
    LAYOUT = 2
    CORRUPT = 3
    NOT_FOUND = 4
    NO_SLOT = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """See :class:`FrameKind` for the meaning of the numbers."""

    kind: FrameKind
    generation: int
    rank: int
    version: Version
    layout_digest: str
    offset: int = 0
    nbytes: int = 0
    crc: int = 0
    aux: int = 0

    @property
    def payload_bytes(self) -> int:
        """Bytes that follow the header."""
        return self.nbytes if self.kind in (FrameKind.CHUNK, FrameKind.META) else 0


def offer(generation: int, rank: int, slot: SealedSlot, shard_bytes: int) -> Header:
    """The header that announces a slot."""
    return Header(
        kind=FrameKind.OFFER,
        generation=generation,
        rank=rank,
        version=slot.version,
        layout_digest=slot.layout_digest,
        offset=slot.meta_bytes,
        nbytes=shard_bytes,
        crc=slot.shard_crc,
        aux=slot.meta_crc,
    )


def pack(header: Header) -> bytes:
    """HEADER_BYTES bytes."""
    raw = _HEADER.pack(
        _MAGIC,
        header.kind,
        header.generation,
        header.version.lineage,
        header.version.v,
        header.rank,
        header.layout_digest.encode("latin-1"),
        header.offset,
        header.nbytes,
        header.crc,
        header.aux,
    )
    return raw + _CRC.pack(_native.crc32c(raw))


def unpack(raw: bytes | bytearray) -> Header:
    """Inverse of :func:`pack`. Raises :class:`CorruptTransferError` or :class:`ProtocolError`; trusts no field."""
    magic, kind, generation, lineage, v, rank, digest, offset, nbytes, crc, aux = _HEADER.unpack_from(raw)
    if _CRC.unpack_from(raw, _HEADER.size)[0] != _native.crc32c(memoryview(raw)[: _HEADER.size]):
        raise CorruptTransferError("a header does not match its checksum")
    if magic != _MAGIC or kind not in FrameKind.__members__.values():
        raise ProtocolError(f"not a frame of this version (magic {magic:#x}, kind {kind})")
    header = Header(
        kind=FrameKind(kind),
        generation=generation,
        rank=rank,
        version=Version(v=v, lineage=lineage),
        layout_digest=digest.rstrip(b"\0").decode("latin-1"),
        offset=offset,
        nbytes=nbytes,
        crc=crc,
        aux=aux,
    )
    if header.payload_bytes > CHUNK_BYTES:
        raise ProtocolError(f"a payload of {nbytes} bytes")
    return header
