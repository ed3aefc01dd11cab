"""The native copying threads: what arrives, how far it is, and how it is stopped, held and slowed down."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from deadpool_ext import _native

WAIT_S = 20.0


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[_native.CopyPool]:
    made = _native.CopyPool(threads=request.param)
    yield made
    made.close()


def addresses(parts: list[bytearray]) -> list[tuple[int, int]]:
    return [(_native.address_of(part), len(part)) for part in parts]


@pytest.mark.parametrize("non_temporal", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 63])
def test_sources_in_order_become_the_destination(pool: _native.CopyPool, non_temporal: bool, shift: int) -> None:
    chance = random.Random(7)
    parts = [bytearray(chance.randbytes(size)) for size in (1, 70_001, 0, 64, 300_000, 17)]
    whole = b"".join(parts)
    room = bytearray(len(whole) + 256)
    start = _native.address_of(room) + shift
    job = pool.submit(start, addresses(parts), chunk_bytes=4096, non_temporal=non_temporal)
    assert job.wait(WAIT_S)
    assert job.progress() == (len(whole), _native.crc32c(whole))
    assert bytes(room[shift : shift + len(whole)]) == whole
    assert not any(room[:shift]) and not any(room[shift + len(whole) :])
    seconds, cpu_seconds = job.times()
    assert seconds > 0 and cpu_seconds > 0


def test_progress_is_a_prefix_with_its_checksum(pool: _native.CopyPool) -> None:
    data = bytearray(random.Random(1).randbytes(100_000))
    room = bytearray(len(data))
    job = pool.submit(_native.address_of(room), addresses([data]), chunk_bytes=1000, allowed=50_000)
    while job.progress()[0] < 50_000:
        assert not job.wait(0.001)
    assert job.progress() == (50_000, _native.crc32c(data[:50_000]))
    assert not any(room[50_000:])
    with pytest.raises(RuntimeError, match="not ended"):
        job.times()
    job.allow(len(data))
    assert job.wait(WAIT_S) and room == data


def test_what_is_cancelled_stops_between_chunks_and_the_next_job_runs(pool: _native.CopyPool) -> None:
    data = bytearray(b"x" * 10_000)
    room = bytearray(len(data))
    job = pool.submit(_native.address_of(room), addresses([data]), chunk_bytes=1000, allowed=0)
    assert not job.wait(0.0)
    job.cancel()
    assert job.wait(WAIT_S) and job.progress() == (0, 0) and not any(room)
    after = pool.submit(_native.address_of(room), addresses([data]))
    assert after.wait(WAIT_S) and room == data


def test_nothing_is_begun_while_paused(pool: _native.CopyPool) -> None:
    data = bytearray(b"x" * 10_000)
    room = bytearray(len(data))
    pool.pause()
    job = pool.submit(_native.address_of(room), addresses([data]))
    assert not job.wait(0.02) and job.progress() == (0, 0)
    pool.resume()
    assert job.wait(WAIT_S) and room == data


def test_a_limit_is_kept_and_can_be_lifted(pool: _native.CopyPool) -> None:
    data = bytearray(b"x" * 10_000)
    room = bytearray(len(data))
    pool.limit(1e-3)  # the second chunk's turn is years away
    job = pool.submit(_native.address_of(room), addresses([data]), chunk_bytes=1000)
    while job.progress()[0] < 1000:
        assert not job.wait(0.001)
    assert not job.wait(0.02) and job.progress()[0] == 1000
    pool.limit(0)
    assert job.wait(WAIT_S) and room == data


def test_an_empty_job_has_ended(pool: _native.CopyPool) -> None:
    room = bytearray(1)
    assert pool.submit(_native.address_of(room), []).wait(0.0)


def test_closing_ends_what_was_not_begun() -> None:
    pool = _native.CopyPool()
    data, room = bytearray(b"x" * 100), bytearray(100)
    job = pool.submit(_native.address_of(room), addresses([data]), allowed=0)
    pool.close()
    assert job.wait(WAIT_S) and job.progress() == (0, 0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(_native.address_of(room), addresses([data]))


def test_a_job_outlives_its_pool_object() -> None:
    data, room = bytearray(b"x" * 100_000), bytearray(100_000)
    job = _native.CopyPool(threads=2).submit(_native.address_of(room), addresses([data]), chunk_bytes=100)
    assert job.wait(WAIT_S) and room == data


def test_bad_arguments_are_refused(pool: _native.CopyPool) -> None:
    room = bytearray(8)
    with pytest.raises(ValueError, match="threads"):
        _native.CopyPool(threads=0)
    with pytest.raises(ValueError, match="null"):
        pool.submit(0, [])
    with pytest.raises(ValueError, match="null"):
        pool.submit(_native.address_of(room), [(0, 8)])
    with pytest.raises(ValueError, match="chunk_bytes"):
        pool.submit(_native.address_of(room), [], chunk_bytes=0)
    with pytest.raises(ValueError, match="not negative"):
        pool.limit(-1.0)
    with pytest.raises(TypeError):
        pool.submit(_native.address_of(room), [1])  # type: ignore[list-item]
