"""One rank's segment of the host arena: three checksummed slots in shared memory that outlive their writer.

Layout: a header page (identity, words on the live state, one descriptor a slot), then the slots, each the shard
followed by room for metadata, page-aligned. A slot's state is one atomic word:

    EMPTY/VOID --begin--> WRITING --seal--> SEALED --void--> VOID        (WRITING --abandon/reset--> EMPTY)

One process writes a segment at a time; any process of the node may read. A reader trusts a slot only while its
state is SEALED and its sequence number does not change (INV-2). Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from deadpool_ext import _native
from deadpool_ext.protocol.types import InvariantError, ShardSpec, SlotInfo, Version, invariant
from deadpool_ext.replication import memfd
from deadpool_ext.replication.errors import CorruptSlotError, SegmentFormatError, SlotStateError

SLOTS = 3
_MAGIC = int.from_bytes(b"DPARENA1", "little")
_ABI = 1
_NONE = 2**64 - 1
_PAGE = mmap.PAGESIZE

_IDENTITY = struct.Struct("<QIIQQ16sI")  # magic, abi, rank, shard bytes, meta capacity, layout digest, slots
_CHANGES_AT = 64  # u64, grows at every transition of a slot
_PINS_AT = 72  # u64, bit i: slot i must not be overwritten
_MUTATING_AT = 128  # u64, the version being computed in place, or NONE
_DONE_AT = 136  # u64, the version that the live tensors hold, or NONE
_LINEAGE_AT = 144  # u64, of the latter
_SLOT_AT = 256
_SLOT_STRIDE = 128
_STATE = 0  # u64, within a descriptor
_SEQUENCE = 8  # u64
_BODY_AT = 16
_BODY = struct.Struct("<QQQII16s")  # v, lineage, meta bytes, shard crc, meta crc, layout digest
_BODY_CRC = struct.Struct("<I")


class SlotState(enum.IntEnum):
    """What a slot holds."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2
    VOID = 3  # was sealed, must not be used any more


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedSlot:
    """Descriptor of a sealed slot as read at one moment; ``sequence`` tells whether it is still the same."""

    index: int
    sequence: int
    version: Version
    meta_bytes: int
    shard_crc: int
    meta_crc: int
    layout_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """What a worker last said about its live tensors. ``mutating``: the version it was writing into them, if any."""

    version: Version | None
    mutating: int | None

    @property
    def dirty(self) -> bool:
        """True while an optimizer step is under way or was cut short: the live tensors are torn."""
        return self.mutating is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotViews:
    """A slot's memory, uint8: ``shard`` (shard_bytes) and ``meta`` (its written length, or the capacity to write)."""

    shard: memoryview
    meta: memoryview


def choose_slot(states: Sequence[SlotState], sealed: Sequence[SealedSlot], pinned: frozenset[int]) -> int | None:
    """The slot that a writer may take: an unused one, else the oldest sealed one; None if there is none.

    Never the newest sealed slot, which may be the only copy (INV-3), and never a pinned one.
    """
    holds = {slot.index: slot for slot in sealed}
    free = [index for index in range(len(states)) if index not in holds and index not in pinned]
    if free:
        return free[0]
    newest = max(sealed, key=lambda slot: slot.version)
    older = [slot for slot in sealed if slot.index != newest.index and slot.index not in pinned]
    return min(older, key=lambda slot: slot.version).index if older else None


def is_above(version: Version, target: Version) -> bool:
    """Whether a slot must be voided when a job resumes at ``target``: later, or another lineage's same iteration."""
    return version.v > target.v or (version.v == target.v and version.lineage != target.lineage)


def _aligned(nbytes: int) -> int:
    return (nbytes + _PAGE - 1) // _PAGE * _PAGE


def segment_bytes(spec: ShardSpec) -> int:
    """Host memory that one segment of this shard takes."""
    return _PAGE + SLOTS * (_aligned(spec.shard_bytes) + _aligned(spec.meta_capacity))


class Segment:
    """One rank's slots, own or replica. Not thread-safe except where a method says so."""

    def __init__(self, memory: mmap.mmap, fd: int | None, path: str, spec: ShardSpec) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._fd = fd
        self.path = path  # for other processes, as long as the creator lives
        self.spec = spec
        self.rank = spec.rank
        self._open_slot: int | None = None  # the slot that this object is writing

    # ---- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, spec: ShardSpec, *, available: int | None = None) -> Segment:
        """A new segment with three empty slots, every page allocated. ``available`` overrides what the host has.

        Raises :class:`~deadpool_ext.replication.errors.ArenaMemoryError` naming needed and available bytes.
        """
        digest = spec.layout_digest.encode("ascii")
        invariant(0 < len(digest) <= 16, f"a layout digest has at most 16 characters: {spec.layout_digest!r}")
        advice = (
            f"each rank and each hosted replica takes {SLOTS} slots of shard and metadata; use fewer ranks a node, a "
            "larger data-parallel size (smaller shards), or raise the memory limit of the job or container"
        )
        fd, memory = memfd.create(
            f"deadpool-arena-rank{spec.rank}", segment_bytes(spec), available=available, advice=advice
        )
        for at in (_MUTATING_AT, _DONE_AT, _LINEAGE_AT):
            _native.store_u64(memory, at, _NONE)
        _IDENTITY.pack_into(memory, 0, _MAGIC, _ABI, spec.rank, spec.shard_bytes, spec.meta_capacity, digest, SLOTS)
        return cls(memory, fd, f"/proc/{os.getpid()}/fd/{fd}", spec)

    @classmethod
    def open(cls, path: str) -> Segment:
        """Map an existing segment. Raises :class:`SegmentFormatError`, or ``OSError`` where its creator is gone."""
        memory = memfd.attach(path)
        if len(memory) < _PAGE:
            raise SegmentFormatError(f"{path} is too small for a segment")
        magic, abi, rank, shard_bytes, meta_capacity, digest, slots = _IDENTITY.unpack_from(memory, 0)
        if (magic, abi, slots) != (_MAGIC, _ABI, SLOTS):
            raise SegmentFormatError(f"{path} is not a segment of this version (abi {abi}, expected {_ABI})")
        spec = ShardSpec(
            rank=rank,
            shard_bytes=shard_bytes,
            meta_capacity=meta_capacity,
            layout_digest=digest.rstrip(b"\0").decode("ascii"),
        )
        if len(memory) != segment_bytes(spec):
            raise SegmentFormatError(f"{path} has {len(memory)} bytes, its header asks for {segment_bytes(spec)}")
        return cls(memory, None, path, spec)

    def close(self) -> None:
        """Let go of the memory. Views handed out stay valid: the mapping goes with the last of them."""
        self._view.release()
        with contextlib.suppress(BufferError):  # a view is still out there and keeps the mapping alive
            self._memory.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # ---- reading ---------------------------------------------------------------------------------------------------

    def changes(self) -> int:
        """A counter that grows at every transition of any slot: one load tells a watcher there is nothing new."""
        return _native.load_u64(self._memory, _CHANGES_AT)

    def state(self, index: int) -> SlotState:
        """The slot's state word."""
        return SlotState(_native.load_u64(self._memory, self._at(index) + _STATE))

    def slot(self, index: int) -> SealedSlot | None:
        """The slot's descriptor if it is sealed and intact, else None (INV-2)."""
        at = self._at(index)
        sequence = _native.load_u64(self._memory, at + _SEQUENCE)
        if self.state(index) is not SlotState.SEALED:
            return None
        body = self._memory[at + _BODY_AT : at + _BODY_AT + _BODY.size]
        (body_crc,) = _BODY_CRC.unpack_from(self._memory, at + _BODY_AT + _BODY.size)
        if self.state(index) is not SlotState.SEALED or _native.load_u64(self._memory, at + _SEQUENCE) != sequence:
            return None
        if _native.crc32c(body) != body_crc:
            return None
        v, lineage, meta_bytes, shard_crc, meta_crc, digest = _BODY.unpack(body)
        return SealedSlot(
            index=index,
            sequence=sequence,
            version=Version(v=v, lineage=lineage),
            meta_bytes=meta_bytes,
            shard_crc=shard_crc,
            meta_crc=meta_crc,
            layout_digest=digest.rstrip(b"\0").decode("ascii"),
        )

    def slots(self) -> list[SealedSlot]:
        """Descriptors of all sealed, intact slots, oldest version first."""
        found = [slot for index in range(SLOTS) if (slot := self.slot(index)) is not None]
        return sorted(found, key=lambda slot: slot.version)

    def sealed(self) -> list[SlotInfo]:
        """The same as inventory entries."""
        return [
            SlotInfo(rank=self.rank, version=slot.version, layout_digest=slot.layout_digest) for slot in self.slots()
        ]

    def newest(self) -> SealedSlot | None:
        """The newest sealed slot."""
        return max(self.slots(), key=lambda slot: slot.version, default=None)

    def find(self, version: Version) -> SealedSlot | None:
        """The sealed slot of exactly this version."""
        return next((slot for slot in self.slots() if slot.version == version), None)

    def unchanged(self, slot: SealedSlot) -> bool:
        """Whether the slot still holds what ``slot`` describes: to be asked *after* its memory was used."""
        at = self._at(slot.index)
        return (
            self.state(slot.index) is SlotState.SEALED
            and _native.load_u64(self._memory, at + _SEQUENCE) == slot.sequence
        )

    def views(self, slot: SealedSlot) -> SlotViews:
        """Read-only memory of a sealed slot, **not verified**: for readers that check as they go (streams)."""
        if not self.unchanged(slot):
            raise SlotStateError(f"slot {slot.index} of rank {self.rank} is no longer version {slot.version}")
        shard, meta = self._ranges(slot.index)
        return SlotViews(
            shard=self._view[shard : shard + self.spec.shard_bytes].toreadonly(),
            meta=self._view[meta : meta + slot.meta_bytes].toreadonly(),
        )

    def verify(self, slot: SealedSlot) -> bool:
        """Whether shard and metadata match their checksums (one pass over the memory, without the GIL)."""
        views = self.views(slot)
        good = _native.crc32c(views.shard) == slot.shard_crc and _native.crc32c(views.meta) == slot.meta_crc
        return good and self.unchanged(slot)

    def read(self, version: Version) -> SlotViews:
        """Verified read-only memory of a version, to restore from (INV-2).

        Raises :class:`SlotStateError` if it is not here, :class:`CorruptSlotError` if it does not match its checksum.
        """
        slot = self.find(version)
        if slot is None:
            raise SlotStateError(f"rank {self.rank} has no sealed slot of version {version}")
        if not self.verify(slot):
            raise CorruptSlotError(self.rank, version, f"slot {slot.index} does not match its checksum")
        return self.views(slot)

    def read_meta(self, version: Version) -> memoryview:
        """Verified read-only metadata of a version: for a reader whose live tensors hold the shard already, which is
        not looked at. Raises like :meth:`read`."""
        slot = self.find(version)
        if slot is None:
            raise SlotStateError(f"rank {self.rank} has no sealed slot of version {version}")
        meta = self.views(slot).meta
        if _native.crc32c(meta) != slot.meta_crc or not self.unchanged(slot):
            raise CorruptSlotError(self.rank, version, f"metadata of slot {slot.index} do not match their checksum")
        return meta

    # ---- writing ---------------------------------------------------------------------------------------------------

    def begin(self, version: Version) -> int:
        """Take a slot for ``version`` and mark it WRITING; returns its index.

        Slots left WRITING by a dead writer count as unused. Raises :class:`SlotStateError` where every other slot is
        pinned (INV-3: the newest sealed one is never taken).
        """
        invariant(self._open_slot is None, f"rank {self.rank}: a slot is already being written")
        states = [self.state(index) for index in range(SLOTS)]
        index = choose_slot(states, self.slots(), self.pinned())
        if index is None:
            raise SlotStateError(f"rank {self.rank}: no slot may be overwritten for {version} (INV-3)")
        at = self._at(index)
        # The sequence moves first and again at the seal: a reader that saw either sealed content notices.
        _native.fetch_add_u64(self._memory, at + _SEQUENCE, 1)
        self._set_state(index, SlotState.WRITING)
        _BODY.pack_into(self._memory, at + _BODY_AT, version.v, version.lineage, 0, 0, 0, b"")
        self._open_slot = index
        return index

    def writable(self, index: int) -> SlotViews:
        """Memory of the slot that this object has begun. May be filled from another thread."""
        self._expect_open(index)
        shard, meta = self._ranges(index)
        return SlotViews(
            shard=self._view[shard : shard + self.spec.shard_bytes],
            meta=self._view[meta : meta + self.spec.meta_capacity],
        )

    def seal(self, index: int, meta: bytes, shard_crc: int) -> SealedSlot:
        """Write the metadata and seal. ``shard_crc``: CRC-32C of the shard as written. Raises SlotStateError if the
        metadata exceeds its capacity (the slot stays WRITING)."""
        if len(meta) > self.spec.meta_capacity:
            raise SlotStateError(
                f"rank {self.rank}: {len(meta)} bytes of metadata exceed the {self.spec.meta_capacity} reserved"
            )
        self.writable(index).meta[: len(meta)] = meta
        return self.seal_written(index, len(meta), shard_crc, _native.crc32c(meta))

    def seal_written(self, index: int, meta_bytes: int, shard_crc: int, meta_crc: int) -> SealedSlot:
        """Seal a slot whose shard and metadata are in place. An older slot of the same version is voided."""
        self._expect_open(index)
        at = self._at(index)
        v, lineage, *_ = _BODY.unpack_from(self._memory, at + _BODY_AT)
        digest = self.spec.layout_digest.encode("ascii")
        body = _BODY.pack(v, lineage, meta_bytes, shard_crc, meta_crc, digest)
        self._memory[at + _BODY_AT : at + _BODY_AT + _BODY.size] = body
        _BODY_CRC.pack_into(self._memory, at + _BODY_AT + _BODY.size, _native.crc32c(body))
        twins = [slot for slot in self.slots() if slot.version == Version(v=v, lineage=lineage)]
        _native.fetch_add_u64(self._memory, at + _SEQUENCE, 1)
        self._set_state(index, SlotState.SEALED)
        self._open_slot = None
        for twin in twins:
            self.void(twin)
        sealed = self.slot(index)
        if sealed is None:
            raise InvariantError(f"rank {self.rank}: slot {index} is not readable after its seal")
        return sealed

    def abandon(self, index: int) -> None:
        """Give back the slot that this object has begun."""
        self._expect_open(index)
        self._set_state(index, SlotState.EMPTY)
        self._open_slot = None

    def reset_writing(self) -> list[int]:
        """Empty every slot left WRITING. Only after its writer is dead or has let go (the reaper, or the writer)."""
        left = [index for index in range(SLOTS) if self.state(index) is SlotState.WRITING]
        for index in left:
            self._set_state(index, SlotState.EMPTY)
        self._open_slot = None
        return left

    def void(self, slot: SealedSlot) -> None:
        """Make a sealed slot unusable; no effect if it no longer holds what ``slot`` describes. Safe beside the
        writer: a slot that it has begun to overwrite is not touched."""
        at = self._at(slot.index) + _STATE
        if self.unchanged(slot) and _native.compare_exchange_u64(self._memory, at, SlotState.SEALED, SlotState.VOID):
            _native.fetch_add_u64(self._memory, _CHANGES_AT, 1)

    def void_above(self, target: Version) -> list[Version]:
        """Void every sealed slot above the recovery target; returns their versions."""
        above = [slot for slot in self.slots() if is_above(slot.version, target)]
        for slot in above:
            self.void(slot)
        return [slot.version for slot in above]

    def pinned(self) -> frozenset[int]:
        """Indices of slots that a durable save is reading."""
        mask = _native.load_u64(self._memory, _PINS_AT)
        return frozenset(index for index in range(SLOTS) if mask >> index & 1)

    def pin(self, slot: SealedSlot) -> None:
        """Keep a sealed slot from being overwritten until :meth:`unpin`. At most one may be pinned."""
        invariant(self.pinned() <= {slot.index}, f"rank {self.rank}: another slot is pinned already")
        _native.store_u64(self._memory, _PINS_AT, 1 << slot.index)
        if not self.unchanged(slot):
            _native.store_u64(self._memory, _PINS_AT, 0)
            raise SlotStateError(f"slot {slot.index} of rank {self.rank} is no longer version {slot.version}")

    def unpin(self) -> None:
        """Let the pinned slot be overwritten again."""
        _native.store_u64(self._memory, _PINS_AT, 0)

    def flip_bit(self, slot: SealedSlot, bit: int) -> None:
        """Fault injection: flip one bit of a sealed slot's content, leaving its checksums alone. ``bit`` counts
        through the shard and then the metadata, and starts over at the end."""
        shard, meta = self._ranges(slot.index)
        at = bit // 8 % max(1, self.spec.shard_bytes + slot.meta_bytes)
        where = shard + at if at < self.spec.shard_bytes else meta + at - self.spec.shard_bytes
        self._memory[where] ^= 1 << bit % 8

    # ---- the live tensors ------------------------------------------------------------------------------------------

    def begin_mutation(self, v: int) -> None:
        """Worker, just before the optimizer changes the first byte on the way to version ``v``."""
        _native.store_u64(self._memory, _MUTATING_AT, v)

    def set_live(self, version: Version) -> None:
        """Worker: the live tensors hold exactly ``version`` (end of an optimizer step, of set-up, of a restore)."""
        _native.store_u64(self._memory, _DONE_AT, version.v)
        _native.store_u64(self._memory, _LINEAGE_AT, version.lineage)
        _native.store_u64(self._memory, _MUTATING_AT, _NONE)

    def live(self) -> LiveState:
        """What the worker last said; exact once it is fenced, unwound or dead."""
        mutating, v, lineage = (_native.load_u64(self._memory, at) for at in (_MUTATING_AT, _DONE_AT, _LINEAGE_AT))
        return LiveState(
            version=None if v == _NONE else Version(v=v, lineage=lineage),
            mutating=None if mutating == _NONE else mutating,
        )

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _at(self, index: int) -> int:
        return _SLOT_AT + index * _SLOT_STRIDE

    def _ranges(self, index: int) -> tuple[int, int]:
        """Offsets of a slot's shard and metadata."""
        shard_room, meta_room = _aligned(self.spec.shard_bytes), _aligned(self.spec.meta_capacity)
        shard = _PAGE + index * (shard_room + meta_room)
        return shard, shard + shard_room

    def _expect_open(self, index: int) -> None:
        if self._open_slot != index or self.state(index) is not SlotState.WRITING:
            raise SlotStateError(f"rank {self.rank}: slot {index} is not being written by this process")

    def _set_state(self, index: int, state: SlotState) -> None:
        _native.store_u64(self._memory, self._at(index) + _STATE, state)
        _native.fetch_add_u64(self._memory, _CHANGES_AT, 1)
