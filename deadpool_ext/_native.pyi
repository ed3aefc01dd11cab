"""Checksums and atomic words in shared memory (``csrc/native``)."""

from collections.abc import Buffer

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
