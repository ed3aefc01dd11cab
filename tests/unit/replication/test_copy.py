"""The copy engine: what is in the slot, what may go wrong, and who may write."""

import threading
from collections.abc import Iterator

import pytest

from deadpool_ext import _native
from deadpool_ext.protocol.types import ShardSpec, Version
from deadpool_ext.replication import copy as copy_module
from deadpool_ext.replication.arena import SLOTS, Segment, SlotState
from deadpool_ext.replication.copy import CopyEngine, Source
from deadpool_ext.replication.errors import CopyError, CudaCopyEngineRequiredError, FencedError

SPEC = ShardSpec(rank=0, shard_bytes=300_000, meta_capacity=100, layout_digest="d")
V1 = Version(v=1, lineage=0)
PARTS = [bytearray(b"a" * 100_000), bytearray(b"b" * 50_001), bytearray(b"c" * 149_999)]


def sources(parts: list[bytearray] = PARTS) -> list[Source]:
    return [(_native.address_of(part), len(part)) for part in parts]


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(SPEC)
    yield made
    made.close()


def test_sources_in_order_become_the_shard(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_module, "CHUNK_BYTES", 4096)
    engine = CopyEngine()
    ticket = engine.start(segment, V1, sources())
    assert segment.slots() == []  # INV-2: not before finish
    ticket.wait(20)
    assert ticket.done() and ticket.d2h_seconds > 0 and ticket.nbytes == 300_000
    assert segment.slots() == []
    sealed = ticket.finish(b"meta")
    assert sealed.version == V1 and engine.current() is None
    views = segment.read(V1)
    assert bytes(views.shard) == b"".join(PARTS) and bytes(views.meta) == b"meta"
    engine.close()


def test_sizes_must_add_up(segment: Segment) -> None:
    engine = CopyEngine()
    with pytest.raises(CopyError, match="300000"):
        engine.start(segment, V1, sources(PARTS[:2]))
    assert all(segment.state(i) is SlotState.EMPTY for i in range(SLOTS))
    engine.close()


def test_device_memory_needs_another_engine() -> None:
    with pytest.raises(CudaCopyEngineRequiredError, match="CUDA copy engine"):
        CopyEngine(device="cuda")


class Held:
    """A hook that stops the copy thread at a point until it is released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()

    def __call__(self, version: Version, copied: int) -> None:
        self.reached.set()
        assert self.release.wait(20)


def test_a_second_copy_is_refused_while_one_is_open(segment: Segment) -> None:
    held = Held()
    engine = CopyEngine(on_copy=held)
    ticket = engine.start(segment, V1, sources())
    assert engine.current() is ticket
    with pytest.raises(CopyError, match="still open"):
        engine.start(segment, V1, sources())
    with pytest.raises(CopyError, match="not done"):
        ticket.finish(b"")
    held.release.set()
    ticket.wait(20)
    ticket.finish(b"")
    engine.close()


def test_a_fence_ends_the_wait_and_abandon_gives_the_slot_back(segment: Segment) -> None:
    held = Held()
    engine = CopyEngine(on_copy=held)
    ticket = engine.start(segment, V1, sources())
    with pytest.raises(FencedError):
        ticket.wait(20, fence=lambda: 3)
    assert segment.state(ticket.index) is SlotState.WRITING
    held.release.set()
    ticket.abandon()
    assert segment.state(ticket.index) is SlotState.EMPTY and segment.slots() == []
    engine.start(segment, V1, sources()).abandon()
    engine.close()


def test_a_copy_that_does_not_stop_keeps_its_slot(segment: Segment) -> None:
    held = Held()
    engine = CopyEngine(on_copy=held)
    ticket = engine.start(segment, V1, sources())
    assert held.reached.wait(20)
    with pytest.raises(CopyError, match="does not stop"):
        ticket.abandon(timeout=0.01)
    assert segment.state(ticket.index) is SlotState.WRITING  # nobody else may write while the thread might
    with pytest.raises(CopyError, match="not done after"):
        ticket.wait(0.01)
    held.release.set()
    engine.close()


def test_what_the_hook_raises_reaches_the_caller(segment: Segment) -> None:
    def broken(version: Version, copied: int) -> None:
        raise RuntimeError("broken hook")

    engine = CopyEngine(on_copy=broken)
    ticket = engine.start(segment, V1, sources())
    with pytest.raises(CopyError, match="broken hook"):
        ticket.wait(20)
    engine.close()
