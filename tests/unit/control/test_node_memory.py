"""The node's memory, and faults that hit it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from deadpool_ext import _native
from deadpool_ext.control.agent_events import EnsureSegments
from deadpool_ext.control.agent_faults import Targets, carry_out
from deadpool_ext.control.node_memory import NodeMemory
from deadpool_ext.protocol.messages import Strike, Struck
from deadpool_ext.protocol.types import ShardSpec, Version
from deadpool_ext.replication.arena import Segment, SlotState


def spec(rank: int) -> ShardSpec:
    return ShardSpec(rank=rank, shard_bytes=1000, meta_capacity=100, layout_digest="d")


def seal(segment: Segment, v: int) -> None:
    index = segment.begin(Version(v=v, lineage=0))
    shard = segment.writable(index).shard
    shard[:] = bytes([v]) * len(shard)
    segment.seal(index, b"meta", _native.crc32c(shard))


@pytest.fixture
def memory() -> Iterator[NodeMemory]:
    made = NodeMemory()
    made.ensure(EnsureSegments(own=(spec(0),), hosted=(spec(1),)))
    for v in (1, 2):
        seal(made.own[0], v)
        seal(made.hosted[1], v)
    yield made
    made.close()


def good(segment: Segment) -> list[bool]:
    return [segment.verify(slot) for slot in segment.slots()]


@pytest.mark.parametrize("bit", [None, 0, 7999, 8000])
def test_one_bit_of_the_newest_copy_flips_and_of_no_other(memory: NodeMemory, bit: int | None) -> None:
    assert memory.flip_bit(0, hosted=False, bit=bit) == Version(v=2, lineage=0)
    assert good(memory.own[0]) == [True, False] and good(memory.hosted[1]) == [True, True]
    assert memory.flip_bit(1, hosted=True, bit=bit) == Version(v=2, lineage=0)
    assert good(memory.hosted[1]) == [True, False]


def test_there_may_be_nothing_to_hit(memory: NodeMemory) -> None:
    assert memory.flip_bit(1, hosted=False) is None and memory.flip_bit(7, hosted=True) is None
    memory.own[0].void_above(Version(v=0, lineage=0))
    assert memory.flip_bit(0, hosted=False) is None


def test_what_a_dead_replicator_left_half_written_is_given_back(memory: NodeMemory) -> None:
    for segment in (memory.own[0], memory.hosted[1]):
        segment.begin(Version(v=3, lineage=0))
    memory.reset_hosted()
    assert not any(memory.hosted[1].state(index) is SlotState.WRITING for index in range(3))
    assert any(memory.own[0].state(index) is SlotState.WRITING for index in range(3))  # its worker lives


@pytest.mark.parametrize(("kind", "rank"), [("corrupt-slot", 0), ("corrupt-replica", 1), ("corrupt-slot", 1)])
def test_faults_of_memory_are_carried_out_and_told(memory: NodeMemory, kind: str, rank: int) -> None:
    told: list[object] = []
    warned: list[str] = []

    async def tell(message: object) -> None:
        told.append(message)

    strike = Strike(fault={"id": 3, "kind": kind}, node="n0", rank=rank)
    asyncio.run(carry_out(strike, Targets(agent=0, worker=0, replicator=0), memory, tell, warned.append))
    assert [type(message) for message in told] == [Struck]  # in any case: whoever stands there goes on
    there = (kind, rank) != ("corrupt-slot", 1)
    assert bool(warned) is not there
    assert (all(good(memory.own[0])) and all(good(memory.hosted[1]))) is not there
