"""The node's board: a page of shared words that say which generation rules and what is committed.

Written by the agent (fence) and the replicator (commit), read by everyone on the node without a lock or a system
call. Generations only grow; an older one never has an effect (INV-4).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from deadpool_ext import _native
from deadpool_ext.protocol.types import Version
from deadpool_ext.replication import memfd
from deadpool_ext.replication.errors import SegmentFormatError

_MAGIC = int.from_bytes(b"DPBOARD1", "little")
_NBYTES = mmap.PAGESIZE
_NONE = 2**64 - 1

# Offsets of u64 words; the fence stands on a cache line of its own.
_MAGIC_AT = 0
_FENCE_AT = 64
_SEQUENCE_AT = 128
_COMMIT_GENERATION_AT = 136
_COMMIT_V_AT = 144
_COMMIT_LINEAGE_AT = 152

_READ_TRIES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """``version`` is committed world-wide, as agreed on in ``generation``."""

    generation: int
    version: Version


class Board:
    """One per node. Any process may read; one process writes the fence, one the commit words."""

    def __init__(self, words: mmap.mmap, fd: int | None, path: str) -> None:
        self._words = words
        self._fd = fd
        self.path = path  # for other processes, as long as the creator lives

    @classmethod
    def create(cls) -> Board:
        """A new board: fenced at generation 0, nothing committed. Raises :class:`ArenaMemoryError`."""
        fd, words = memfd.create("deadpool-board", _NBYTES, advice="free some memory")
        _native.store_u64(words, _COMMIT_GENERATION_AT, _NONE)
        _native.store_u64(words, _MAGIC_AT, _MAGIC)
        return cls(words, fd, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str) -> Board:
        """Map an existing board. Raises :class:`SegmentFormatError`, or ``OSError`` where its creator is gone."""
        words = memfd.attach(path)
        if len(words) != _NBYTES or _native.load_u64(words, _MAGIC_AT) != _MAGIC:
            raise SegmentFormatError(f"{path} is not a board of this version")
        return cls(words, None, path)

    def close(self) -> None:
        """Unmap; the creator also drops its descriptor, and with it the path."""
        self._words.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def fence(self, generation: int) -> bool:
        """Announce ``generation``. Returns False, changing nothing, where the board is already at or past it."""
        while (current := self.fence_generation()) < generation:
            if _native.compare_exchange_u64(self._words, _FENCE_AT, current, generation):
                return True
        return False

    def fence_generation(self) -> int:
        """The newest generation announced on this node."""
        return _native.load_u64(self._words, _FENCE_AT)

    def commit(self, generation: int, version: Version) -> bool:
        """Record a commit agreed on in ``generation``; False, changing nothing, if that generation is over (INV-4)
        or the board already shows this version or a later one of it. One writer at a time."""
        if generation < self.fence_generation():
            return False
        words = self._words
        before = self.committed()
        if before is not None and (generation, version.v) <= (before.generation, before.version.v):
            return False
        # Odd while the words change. A writer killed half-way leaves it odd; `| 1` lets its successor go on.
        odd = _native.load_u64(words, _SEQUENCE_AT) | 1
        _native.store_u64(words, _SEQUENCE_AT, odd)
        _native.store_u64(words, _COMMIT_GENERATION_AT, generation)
        _native.store_u64(words, _COMMIT_V_AT, version.v)
        _native.store_u64(words, _COMMIT_LINEAGE_AT, version.lineage)
        _native.store_u64(words, _SEQUENCE_AT, odd + 1)
        return True

    def committed(self) -> Commit | None:
        """The last commit, or None: nothing yet, or the words are being changed at this moment (ask again)."""
        words = self._words
        for _ in range(_READ_TRIES):
            sequence = _native.load_u64(words, _SEQUENCE_AT)
            generation = _native.load_u64(words, _COMMIT_GENERATION_AT)
            v = _native.load_u64(words, _COMMIT_V_AT)
            lineage = _native.load_u64(words, _COMMIT_LINEAGE_AT)
            if sequence % 2 == 0 and _native.load_u64(words, _SEQUENCE_AT) == sequence:
                if generation == _NONE:
                    return None
                return Commit(generation=generation, version=Version(v=v, lineage=lineage))
        return None
