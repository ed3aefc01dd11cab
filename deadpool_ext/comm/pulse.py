"""A worker's pulse: shared memory that shows from outside where the worker is, what it waits for and whether it moves.

The agent owns the memory, one piece a worker; the worker's main thread writes its place, and the communicator shells
(``csrc/comm/pulse.h``, the same layout) write operations. Nothing is locked and no system call is made, so it can be
read while the worker holds its interpreter lock, is stopped, or sits in native code. Needs no torch.

All words are unsigned and 64 bits wide; times are CLOCK_MONOTONIC, in nanoseconds. A reader asks again where a
sequence word shows that it read in the middle of a change; of a process that was stopped in the middle of one it takes
what there is.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from deadpool_ext import _native
from deadpool_ext.replication import memfd
from deadpool_ext.replication.errors import SegmentFormatError

#: Where a worker's main thread can be: the phases of fault specs that it passes, and "setup" before all of them.
PLACES: Final = (
    "setup", "data", "forward", "backward", "grad_sync", "optimizer", "gate", "post_step", "eval", "save", "recovery",
    "pause",
)  # fmt: skip

#: c10d's operations, by the number of their type (a unit test compares them with torch's).
OPERATIONS: Final = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "allgather_base", "allgather_coalesced",
    "gather", "scatter", "reduce_scatter", "alltoall_base", "alltoall", "send", "recv", "recvanysource", "barrier",
    "reduce_scatter_base", "coalesced", "allreduce_sparse", "reduce_scatter_tensor_coalesced",
)  # fmt: skip

GROUPS: Final = 512
BLOCKED: Final = 32  # threads that are shown as blocked
GROUP_BYTES: Final = 64
_GROUP_MOVES: Final = 56
COMMUNICATION_BYTES: Final = 64 * (1 + BLOCKED)

_MAGIC: Final = int.from_bytes(b"DPPULSE1", "little")
_NBYTES: Final = 1 << 17
_NO_GENERATION: Final = 2**64 - 1

# Offsets. The place of the main thread has a cache line of its own.
_MAGIC_AT: Final = 0
_SEQUENCE_AT: Final = 64
_PLACE_AT: Final = 72
_ITERATION_AT: Final = 80
_SINCE_AT: Final = 88
_MOVES_AT: Final = 96
_GENERATION_AT: Final = 104
_BUSY_AT: Final = 112
_USED_AT: Final = 120  # places of the table of groups that were ever used: the first so many
_COMMUNICATION_AT: Final = 128  # struct Pulse: time waited, then the blocked threads
_BLOCKED_AT: Final = _COMMUNICATION_AT + 64
_GROUPS_AT: Final = 4096  # struct GroupCounters, one a group
_NAMES_AT: Final = _GROUPS_AT + GROUPS * GROUP_BYTES  # one word a group: where its text is
_TEXT_AT: Final = _NAMES_AT + 8 * GROUPS

_READ_TRIES: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """A thread inside an operation. ``peer``: the rank that it needs, None: all others. ``number``: of a collective
    among those of its group and generation, from 1; 0 for point-to-point."""

    group: str
    ranks: tuple[int, ...]
    operation: str
    number: int
    peer: int | None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One look. ``collectives``: begun in this generation, by group (of more than one member). ``queued``: the last
    collective of each group whose communicator works on a device; whether it is over cannot be seen from the host."""

    place: str
    iteration: int
    place_s: float
    moves: int
    generation: int  # -1: no group yet
    busy_s: float
    blocked: tuple[Blocked, ...]
    collectives: dict[str, int]
    queued: tuple[Blocked, ...] = ()


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    ranks: tuple[int, ...]
    on_device: bool


@dataclass(slots=True)
class _Text:
    """A piece of the text area."""

    offset: int
    nbytes: int


@dataclass(slots=True)
class _Tables:
    """What the writer knows of the table of groups."""

    places: list[int] = field(default_factory=lambda: list(reversed(range(GROUPS))))  # free ones, the lowest last
    texts: dict[int, _Text] = field(default_factory=dict)  # by place
    free: list[_Text] = field(default_factory=lambda: [_Text(_TEXT_AT, _NBYTES - _TEXT_AT)])
    serial: int = 0


class Pulse:
    """One worker's. The worker writes (place and busy time: one thread at a time), anybody reads."""

    def __init__(self, words: mmap.mmap, fd: int | None, path: str) -> None:
        self._words = words
        self._fd = fd
        self.path = path  # for other processes, as long as the creator lives
        self._sequence = _native.load_u64(words, _SEQUENCE_AT)
        self._moves = _native.load_u64(words, _MOVES_AT)
        self._tables = _Tables()
        self._known: dict[int, _Named] = {}  # by the word that says where the text is

    @classmethod
    def create(cls) -> Pulse:
        """A new one, in ``setup``. Raises :class:`ArenaMemoryError`."""
        fd, words = memfd.create("deadpool-pulse", _NBYTES, advice="free some memory")
        pulse = cls(words, fd, f"/proc/{os.getpid()}/fd/{fd}")
        _native.store_u64(words, _GENERATION_AT, _NO_GENERATION)
        pulse.enter("setup", 0)
        _native.store_u64(words, _MAGIC_AT, _MAGIC)
        return pulse

    @classmethod
    def open(cls, path: str) -> Pulse:
        """Map an existing one. Raises :class:`SegmentFormatError`, or ``OSError`` where its creator is gone."""
        words = memfd.attach(path)
        if len(words) != _NBYTES or _native.load_u64(words, _MAGIC_AT) != _MAGIC:
            raise SegmentFormatError(f"{path} is not a worker's pulse of this version")
        return cls(words, None, path)

    def close(self) -> None:
        """Unmap; the creator also drops its descriptor, and with it the path. Not for a worker whose shells write."""
        self._words.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # ---- the worker ------------------------------------------------------------------------------------------------

    def enter(self, place: str, iteration: int) -> None:
        """The main thread comes to ``place`` of the 1-based ``iteration``. Raises KeyError for an unknown place."""
        words, odd = self._words, self._sequence | 1
        self._moves += 1
        _native.store_u64(words, _SEQUENCE_AT, odd)
        _native.store_u64(words, _PLACE_AT, _PLACE_NUMBERS[place])
        _native.store_u64(words, _ITERATION_AT, iteration)
        _native.store_u64(words, _SINCE_AT, time.monotonic_ns())
        _native.store_u64(words, _MOVES_AT, self._moves)
        _native.store_u64(words, _SEQUENCE_AT, odd + 1)
        self._sequence = odd + 1

    def set_busy(self, seconds: float) -> None:
        """Seconds of the iteration that ended in which the worker did not wait for others."""
        _native.store_u64(self._words, _BUSY_AT, max(0, int(seconds * 1e9)))

    def set_generation(self, generation: int) -> None:
        """The generation that groups belong to from now on."""
        _native.store_u64(self._words, _GENERATION_AT, generation if generation >= 0 else _NO_GENERATION)

    def waited_s(self) -> float:
        """Seconds that threads have waited in operations that ended, all together."""
        return _native.load_u64(self._words, _COMMUNICATION_AT) * 1e-9

    @property
    def communication_address(self) -> int:
        """For ``_shell.place_pulse``; valid until :meth:`close`."""
        return _native.address_of(self._words) + _COMMUNICATION_AT

    def add_group(self, name: str, ranks: Sequence[int], *, on_device: bool = False) -> int | None:
        """A place in the table of groups, or None where there is no more room: the group is not shown then.

        ``on_device``: its operations are queued on a device, and the host does not wait in them.
        """
        tables = self._tables
        text = json.dumps([name, _packed(ranks), on_device], separators=(",", ":")).encode()
        room = next((piece for piece in tables.free if piece.nbytes >= len(text)), None)
        if room is None or not tables.places:
            return None
        place = tables.places.pop()
        piece = _Text(room.offset, len(text))
        room.offset += len(text)
        room.nbytes -= len(text)
        tables.texts[place] = piece
        tables.serial = (tables.serial + 1) & 0xFFFF
        self._words[piece.offset : piece.offset + piece.nbytes] = text
        # The serial number tells the text from another one that was in the same place.
        word = tables.serial << 48 | piece.offset << 24 | piece.nbytes
        _native.store_u64(self._words, _NAMES_AT + 8 * place, word)
        _native.store_u64(self._words, _USED_AT, max(self._used(), place + 1))
        return place

    def remove_group(self, place: int) -> None:
        """The group is gone and its counters are kept elsewhere."""
        _native.store_u64(self._words, _NAMES_AT + 8 * place, 0)
        self._tables.free.append(self._tables.texts.pop(place))
        self._tables.places.append(place)

    def group_address(self, place: int) -> int:
        """Where this group's counters are; valid until :meth:`close`."""
        return _native.address_of(self._words) + _GROUPS_AT + place * GROUP_BYTES

    # ---- whoever looks ---------------------------------------------------------------------------------------------

    def moves(self) -> int:
        """Places entered and operations begun and ended: it changes if and only if something goes on."""
        words = self._words
        total = _native.load_u64(words, _MOVES_AT)
        for place in range(self._used()):  # also of groups that are gone: their moves were moves
            total += _native.load_u64(words, _GROUPS_AT + place * GROUP_BYTES + _GROUP_MOVES)
        return total

    def read(self) -> Reading:
        """What is there now. Never waits, whatever the worker does."""
        generation = self._generation()
        place, iteration, since, _ = self._consistent(_SEQUENCE_AT, _PLACE_AT, 4)
        groups = self._groups()
        collectives = self._collectives(groups, generation)
        return Reading(
            place=PLACES[place] if place < len(PLACES) else PLACES[0],
            iteration=iteration,
            place_s=_seconds_since(since),
            moves=self.moves(),
            generation=generation,
            busy_s=_native.load_u64(self._words, _BUSY_AT) * 1e-9,
            blocked=tuple(self._blocked(groups, generation)),
            collectives=collectives,
            queued=tuple(
                _queued(named, collectives[named.name])
                for named in groups.values()
                if named.on_device and collectives.get(named.name)
            ),
        )

    def _used(self) -> int:
        return min(GROUPS, _native.load_u64(self._words, _USED_AT))

    def _generation(self) -> int:
        generation = _native.load_u64(self._words, _GENERATION_AT)
        return -1 if generation == _NO_GENERATION else generation

    def _consistent(self, sequence_at: int, first: int, count: int) -> tuple[int, ...]:
        words = self._words
        values: tuple[int, ...] = ()
        for _ in range(_READ_TRIES):
            sequence = _native.load_u64(words, sequence_at)
            values = tuple(_native.load_u64(words, first + 8 * index) for index in range(count))
            if sequence % 2 == 0 and _native.load_u64(words, sequence_at) == sequence:
                break
        return values

    def _groups(self) -> dict[int, _Named]:
        """Groups by place."""
        words, found = self._words, {}
        for place in range(self._used()):
            at = _NAMES_AT + 8 * place
            word = _native.load_u64(words, at)
            if word and word not in self._known:
                offset, nbytes = word >> 24 & 0xFFFFFF, word & 0xFFFFFF
                text = bytes(words[offset : offset + nbytes])
                if _native.load_u64(words, at) != word:
                    continue
                name, ranks, on_device = json.loads(text)
                self._known[word] = _Named(name, _unpacked(ranks), on_device)
            if word:
                found[place] = self._known[word]
        return found

    def _blocked(self, groups: dict[int, _Named], generation: int) -> list[Blocked]:
        words, found = self._words, []
        for index in range(BLOCKED):
            at = _BLOCKED_AT + 64 * index
            ticket = _native.load_u64(words, at)
            if ticket < 2:
                continue
            place, of, number, operation, peer, since = (_native.load_u64(words, at + 8 * word) for word in range(1, 7))
            named = groups.get(place)
            if _native.load_u64(words, at) != ticket or named is None or of != generation:
                continue
            found.append(
                Blocked(
                    group=named.name,
                    ranks=named.ranks,
                    operation=OPERATIONS[operation] if operation < len(OPERATIONS) else "unknown",
                    number=number,
                    peer=named.ranks[peer - 1] if 0 < peer <= len(named.ranks) else None,
                    seconds=_seconds_since(since),
                )
            )
        return found

    def _collectives(self, groups: dict[int, _Named], generation: int) -> dict[str, int]:
        found = {}
        for place, named in groups.items():
            at = _GROUPS_AT + place * GROUP_BYTES
            of, *_, collectives = self._consistent(at, at + 8, 6)
            if of == generation and len(named.ranks) > 1:
                found[named.name] = collectives
        return found


_PLACE_NUMBERS: Final = {name: number for number, name in enumerate(PLACES)}


def _queued(named: _Named, number: int) -> Blocked:
    return Blocked(group=named.name, ranks=named.ranks, operation="a collective", number=number, peer=None, seconds=0.0)


def _seconds_since(then_ns: int) -> float:
    return max(0.0, (time.monotonic_ns() - then_ns) * 1e-9)


def _packed(ranks: Sequence[int]) -> Any:
    """Equally spaced ranks, as nearly all groups have them, as ``{"first", "step", "count"}``; others as they are."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1:
        return {"first": ranks[0], "step": steps.pop(), "count": len(ranks)}
    return list(ranks)


def _unpacked(ranks: Any) -> tuple[int, ...]:
    if isinstance(ranks, dict):
        return tuple(ranks["first"] + ranks["step"] * index for index in range(ranks["count"]))
    return tuple(ranks)
