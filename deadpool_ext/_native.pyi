"""Checksums, copying threads, and atomic words in shared memory (``csrc/native``)."""

from collections.abc import Buffer, Sequence
from typing import final

def crc32c(buffer: Buffer, init: int = 0, /) -> int:
    """CRC-32C of a contiguous buffer, continued from ``init``; releases the GIL on large buffers."""

def crc32c_portable(buffer: Buffer, init: int = 0, /) -> int:
    """The same by tables only: the fallback, and the reference for tests."""

def crc32c_combine(first: int, second: int, second_nbytes: int, /) -> int:
    """CRC-32C of a concatenation from the checksums of its parts and the length of the second."""

def crc32c_backend() -> str:
    """``"sse4.2"`` or ``"table"``."""

def copy_crc32c(dst_addr: int, src_addr: int, nbytes: int, init: int = 0, /) -> int:
    """Copy between two addresses of this process (not overlapping, both kept alive by the caller) without the GIL;
    returns the CRC-32C of the bytes written, continued from ``init``."""

def address_of(buffer: Buffer, /) -> int:
    """Address of a buffer's first byte; valid as long as the buffer's owner keeps the memory."""

def load_u64(buffer: Buffer, offset: int, /) -> int: ...
def load_u32(buffer: Buffer, offset: int, /) -> int: ...
def store_u64(buffer: Buffer, offset: int, value: int, /) -> None: ...
def store_u32(buffer: Buffer, offset: int, value: int, /) -> None: ...
def compare_exchange_u64(buffer: Buffer, offset: int, expected: int, desired: int, /) -> bool: ...
def compare_exchange_u32(buffer: Buffer, offset: int, expected: int, desired: int, /) -> bool: ...
def fetch_add_u64(buffer: Buffer, offset: int, value: int, /) -> int: ...

@final
class CopyPool:
    """Threads that copy memory and checksum it on the way, without the interpreter. Thread-safe; not kept by a fork."""

    def __new__(cls, threads: int = 1, name: str = "dp-copy", nice: int = 0) -> CopyPool:
        """``name``: of the threads (15 bytes). ``nice``: added to their niceness. Raises ValueError, OSError."""

    def submit(
        self,
        destination: int,
        sources: Sequence[tuple[int, int]],
        chunk_bytes: int = 4194304,
        non_temporal: bool = False,
        allowed: int = 2**64 - 1,
    ) -> CopyJob:
        """Copy ``sources`` (address, bytes), in order, to the address ``destination``; returns at once.

        Jobs are carried out one after the other, chunks of one at the same time. ``non_temporal``: past the caches.
        ``allowed``: chunks that begin at this byte or later wait for :meth:`CopyJob.allow`. The caller keeps the memory
        alive, and the sources unchanged, until the job has ended. Raises ValueError, RuntimeError (closed).
        """

    def pause(self) -> None:
        """Begin no chunk until :meth:`resume`."""

    def resume(self) -> None: ...
    def limit(self, bytes_per_second: float, /) -> None:
        """Bandwidth of all jobs together, kept chunk by chunk; 0: none."""

    def close(self) -> None:
        """Cancel all jobs and end the threads, when the chunks that are being copied are done."""

@final
class CopyJob:
    """One copy; see :meth:`CopyPool.submit`. Thread-safe."""

    def wait(self, timeout_s: float, /) -> bool:
        """Wait until nothing of it runs and nothing will (complete or cancelled); False after the time."""

    def cancel(self) -> None:
        """Begin no more chunks. Returns at once."""

    def allow(self, nbytes: int, /) -> None:
        """Chunks that begin before this byte may be copied."""

    def progress(self) -> tuple[int, int]:
        """Bytes that are complete, counted from the start, and their CRC-32C."""

    def times(self) -> tuple[float, float]:
        """Seconds from the first chunk's begin to the last one's end, and CPU seconds of all threads. Raises
        RuntimeError before it has ended."""
