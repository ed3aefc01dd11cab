"""The worker's copy engine: shard -> slot on a thread of its own, beside the training.

``start`` takes a slot and returns at once; the copy runs in native code without the GIL and checksums what it
writes; ``finish`` adds the metadata and seals. One copy at a time: the next start waits for nothing and refuses
while a ticket is open.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence

from deadpool_ext import _native
from deadpool_ext.protocol.types import InvariantError, Version, invariant
from deadpool_ext.replication.arena import SealedSlot, Segment
from deadpool_ext.replication.errors import CopyError, CudaCopyEngineRequiredError, FencedError

CHUNK_BYTES = 16 * 2**20  # between two looks at the cancel flag: a few milliseconds
_POLL_S = 0.001

Source = tuple[int, int]  # address, bytes
CopyHook = Callable[[Version, int], None]  # version, bytes copied so far; runs on the copy thread


class _Cancelled(Exception):
    """Internal: the copy was told to stop."""


class Ticket:
    """One copy under way. Used by the worker's main thread only."""

    def __init__(self, segment: Segment, index: int, version: Version, nbytes: int) -> None:
        self._segment = segment
        self.index = index
        self.version = version
        self.nbytes = nbytes
        self.d2h_seconds = 0.0  # time the copy itself took; set when it is done
        self.shard_crc: int | None = None
        self.sealed: SealedSlot | None = None
        self._cancel = False
        self._open = True
        self._future: concurrent.futures.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """True until it is finished or abandoned."""
        return self._open

    def done(self) -> bool:
        """Whether the bytes are in the slot."""
        return self._future is not None and self._future.done()

    def wait(self, timeout: float, fence: Callable[[], int | None] = lambda: None) -> float:
        """Block until the bytes are in the slot; returns the seconds waited.

        ``fence`` is asked about every millisecond and returns a newer generation or None. Raises
        :class:`FencedError` then, :class:`CopyError` after ``timeout`` seconds, and what the copy itself raised. The
        ticket stays open in all these cases: :meth:`abandon` it.
        """
        future = self._future
        if future is None:
            raise InvariantError("a ticket comes from CopyEngine.start")
        started = time.monotonic()
        while not future.done():
            newer = fence()
            if newer is not None:
                raise FencedError(newer)
            if time.monotonic() - started > timeout:
                raise CopyError(f"rank {self._segment.rank}: copy of {self.version} not done after {timeout} s")
            concurrent.futures.wait([future], timeout=_POLL_S)
        error = future.exception()
        if error is not None:
            raise CopyError(f"rank {self._segment.rank}: copy of {self.version} failed: {error!r}") from error
        return time.monotonic() - started

    def finish(self, meta: bytes) -> SealedSlot:
        """Seal the slot with its metadata; the copy must be done (see :meth:`wait`). Raises
        :class:`~deadpool_ext.replication.errors.SlotStateError` if ``meta`` exceeds its capacity."""
        invariant(self._open, f"ticket of {self.version} is closed")
        if self.shard_crc is None:
            raise CopyError(f"rank {self._segment.rank}: copy of {self.version} is not done (INV-2)")
        self.sealed = self._segment.seal(self.index, meta, self.shard_crc)
        self._open = False
        return self.sealed

    def abandon(self, timeout: float = 5.0) -> None:
        """Stop the copy and give the slot back; returns when nothing writes to it any more. No effect once closed.

        Raises :class:`CopyError` if the copy does not stop within ``timeout`` seconds.
        """
        if not self._open:
            return
        self._cancel = True
        if self._future is not None:
            _, running = concurrent.futures.wait([self._future], timeout=timeout)
            if running:
                raise CopyError(f"rank {self._segment.rank}: copy of {self.version} does not stop")
        self._segment.abandon(self.index)
        self._open = False

    def _run(self, sources: Sequence[Source], hook: CopyHook | None) -> None:
        """On the copy thread."""
        started = time.monotonic()
        crc = copied = 0
        with self._segment.writable(self.index).shard as shard:
            base = _native.address_of(shard)
            for address, nbytes in sources:
                for at in range(0, nbytes, CHUNK_BYTES):
                    if hook is not None:
                        hook(self.version, copied)
                    if self._cancel:
                        raise _Cancelled
                    step = min(CHUNK_BYTES, nbytes - at)
                    crc = _native.copy_crc32c(base + copied, address + at, step, crc)
                    copied += step
        self.d2h_seconds = time.monotonic() - started
        self.shard_crc = crc


class CopyEngine:
    """One per worker, made after the fork. ``on_copy`` is called on the copy thread before each chunk (fault
    injection, phase ``d2h``). The caller keeps the sources alive and unchanged until the copy is done."""

    def __init__(self, device: str = "cpu", on_copy: CopyHook | None = None) -> None:
        if device != "cpu":
            raise CudaCopyEngineRequiredError(f"device {device!r} needs the CUDA copy engine, which is not built in")
        self._on_copy = on_copy
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="deadpool-copy")
        self._ticket: Ticket | None = None

    def start(self, segment: Segment, version: Version, sources: Sequence[Source]) -> Ticket:
        """Begin to copy host memory ``sources`` (address, bytes; together the shard, in order) into a free slot.

        Raises :class:`CopyError` if the sizes do not add up to the shard or another ticket is open, and
        :class:`~deadpool_ext.replication.errors.SlotStateError` if no slot is free (INV-3).
        """
        if self._ticket is not None and self._ticket.is_open:
            raise CopyError(f"rank {segment.rank}: the copy of {self._ticket.version} is still open")
        nbytes = sum(size for _, size in sources)
        if nbytes != segment.spec.shard_bytes:
            raise CopyError(f"rank {segment.rank}: sources have {nbytes} bytes, the shard {segment.spec.shard_bytes}")
        ticket = Ticket(segment, segment.begin(version), version, nbytes)
        ticket._future = self._thread.submit(ticket._run, tuple(sources), self._on_copy)
        self._ticket = ticket
        return ticket

    def current(self) -> Ticket | None:
        """The open ticket, if there is one."""
        return self._ticket if self._ticket is not None and self._ticket.is_open else None

    def close(self) -> None:
        """Abandon what is open and end the thread."""
        if self._ticket is not None:
            self._ticket.abandon()
        self._thread.shutdown(wait=True)
