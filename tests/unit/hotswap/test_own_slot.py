"""A rank's own slot: what is read from it, and what happens when it turns out bad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deadpool_ext import _native
from deadpool_ext.protocol.messages import SlotCorrupt
from deadpool_ext.protocol.types import ShardSpec, Version
from deadpool_ext.replication.arena import Segment
from deadpool_ext.replication.copy import CopyEngine
from deadpool_ext.replication.errors import CorruptSlotError
from megatron.hotswap.loop.own_slot import OwnSlot

V1 = Version(v=1, lineage=0)
SHARD = 5000


class Session:
    """What is said to the coordinator."""

    rank = 3
    generation = 7

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


class Tensors:
    """The live shard."""

    def __init__(self) -> None:
        self.data = bytearray(b"live " * (SHARD // 5))

    def sources(self) -> list[tuple[int, int]]:
        return [(_native.address_of(self.data), SHARD)]


class Rank:
    """A worker that has sealed version 1."""

    def __init__(self) -> None:
        spec = ShardSpec(rank=3, shard_bytes=SHARD, meta_capacity=100, layout_digest="d")
        self.segment = Segment.create(spec)
        self.engine, self.session, self.tensors = CopyEngine(), Session(), Tensors()
        self.own = OwnSlot(self.session, self.segment, self.engine, self.tensors)  # type: ignore[arg-type]
        ticket = self.engine.start(self.segment, V1, self.tensors.sources())
        ticket.wait(20)
        self.own.sealed(ticket.finish(b"meta"), b"meta")

    def mend(self) -> bool:
        ticket = self.own.start_mending()
        if ticket is None:
            return False
        ticket.wait(20)
        self.own.mended(ticket)
        return True

    def void(self) -> None:
        """What a replicator does that finds it bad."""
        slot = self.segment.newest()
        assert slot is not None
        self.segment.flip_bit(slot, 77)
        self.segment.void(slot)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.engine.close()
    made.segment.close()


def test_a_good_slot_is_read_and_never_written_again(rank: Rank) -> None:
    saved = rank.own.read(V1, shard=True)
    assert saved.shard is not None and bytes(saved.shard) == bytes(rank.tensors.data) and bytes(saved.meta) == b"meta"
    assert not rank.mend() and not rank.mend()
    assert rank.session.sent == [] and rank.session.events == []


def test_a_bad_slot_is_not_read_but_voided_and_told(rank: Rank) -> None:
    slot = rank.segment.newest()
    assert slot is not None
    rank.segment.flip_bit(slot, 5)
    assert rank.own.read(V1, shard=False).shard is None  # the live tensors are kept: only metadata count
    with pytest.raises(CorruptSlotError):
        rank.own.read(V1, shard=True)
    assert rank.segment.slots() == []
    (told,) = rank.session.sent
    assert isinstance(told, SlotCorrupt) and (told.rank, told.generation, told.version) == (3, 7, V1)


@pytest.mark.parametrize("shard", [True, False])
def test_a_slot_that_somebody_else_found_bad_is_told_too(rank: Rank, shard: bool) -> None:
    rank.void()
    with pytest.raises(CorruptSlotError):
        rank.own.read(V1, shard=shard)
    assert len(rank.session.sent) == 1


def test_a_void_slot_is_written_again_from_the_live_tensors(rank: Rank) -> None:
    assert not rank.mend()
    rank.void()
    assert rank.mend() and not rank.mend()
    views = rank.segment.read(V1)
    assert bytes(views.shard) == bytes(rank.tensors.data) and bytes(views.meta) == b"meta"
    ((event, fields),) = rank.session.events
    assert (event, fields["kind"]) == ("warning", "slot_rewritten") and rank.session.sent == []


def test_tensors_that_changed_since_are_not_sealed_under_the_version(rank: Rank) -> None:
    rank.void()
    rank.tensors.data[100] ^= 1
    with pytest.raises(CorruptSlotError, match="live tensors"):
        rank.mend()
    assert rank.segment.slots() == []
    assert isinstance(rank.session.sent[0], SlotCorrupt)
    rank.tensors.data[100] ^= 1


def test_after_a_restore_the_slot_that_was_read_is_the_one_to_mend(rank: Rank) -> None:
    other = OwnSlot(rank.session, rank.segment, rank.engine, rank.tensors)  # type: ignore[arg-type]
    other.read(V1, shard=False)
    rank.void()
    rank.own = other
    assert rank.mend()
    assert bytes(rank.segment.read(V1).meta) == b"meta"
