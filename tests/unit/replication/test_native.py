"""Checksums and atomic words of ``deadpool_ext._native``."""

import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_ext import _native


def bitwise_crc32c(data: bytes) -> int:
    """The definition, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def pattern(nbytes: int) -> bytes:
    return bytes((i * 131 + (i >> 7) * 17 + 5) & 0xFF for i in range(nbytes))


def test_check_value_of_the_standard() -> None:
    assert _native.crc32c(b"123456789") == _native.crc32c_portable(b"123456789") == 0xE3069283


@given(st.binary(max_size=300))
def test_both_paths_equal_the_definition(data: bytes) -> None:
    assert _native.crc32c(data) == _native.crc32c_portable(data) == bitwise_crc32c(data)


@pytest.mark.parametrize("nbytes", [4095, 4096, 3 * 4096 - 1, 3 * 4096, 3 * 4096 + 9, 7 * 4096 + 3, 200_001])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_lanes_equal_tables_at_any_length_and_alignment(nbytes: int, start: int) -> None:
    data = memoryview(pattern(nbytes + start))[start:]
    assert _native.crc32c(data) == _native.crc32c_portable(data)


@settings(max_examples=50)
@given(st.integers(0, 40_000), st.integers(0, 40_000))
def test_continued_and_combined_checksums_are_those_of_the_whole(first: int, second: int) -> None:
    data = pattern(first + second)
    a, b = data[:first], data[first:]
    whole = _native.crc32c(data)
    assert _native.crc32c(b, _native.crc32c(a)) == whole
    assert _native.crc32c_combine(_native.crc32c(a), _native.crc32c(b), second) == whole


@pytest.mark.parametrize("nbytes", [0, 1, 12 * 4096, 12 * 4096 + 1, 300_001])
def test_copy_returns_the_checksum_of_what_it_wrote(nbytes: int) -> None:
    source = bytearray(pattern(nbytes) + b"guard")
    target = bytearray(nbytes + 5)
    crc = _native.copy_crc32c(_native.address_of(target), _native.address_of(source), nbytes)
    assert crc == _native.crc32c(source[:nbytes])
    assert target == source[:nbytes] + bytes(5)


def test_words() -> None:
    memory = mmap.mmap(-1, 4096)
    _native.store_u64(memory, 8, 2**64 - 1)
    assert _native.load_u64(memory, 8) == 2**64 - 1
    assert _native.load_u32(memory, 8) == _native.load_u32(memory, 12) == 2**32 - 1
    assert not _native.compare_exchange_u64(memory, 8, 0, 1)
    assert _native.compare_exchange_u64(memory, 8, 2**64 - 1, 7)
    assert _native.fetch_add_u64(memory, 8, 3) == 7
    assert _native.load_u64(memory, 8) == 10
    _native.store_u32(memory, 16, 5)
    assert _native.compare_exchange_u32(memory, 16, 5, 6)
    assert memory[16] == 6


def test_words_outside_unaligned_or_too_large_are_refused() -> None:
    memory = mmap.mmap(-1, 4096)
    with pytest.raises(IndexError):
        _native.load_u64(memory, 4096)
    with pytest.raises(IndexError):
        _native.load_u64(memory, 4089 // 8 * 8 + 8)
    with pytest.raises(ValueError, match="aligned"):
        _native.store_u64(memory, 4, 1)
    with pytest.raises(OverflowError):
        _native.store_u32(memory, 0, 2**32)
    with pytest.raises(BufferError):
        _native.store_u64(b"12345678", 0, 1)  # read-only
    with pytest.raises(TypeError):
        _native.load_u64(memory)  # type: ignore[call-arg]
