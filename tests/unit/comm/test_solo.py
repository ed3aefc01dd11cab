"""What a newcomer gets while it constructs alone: the answer of peers that hold what it holds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from deadpool_ext import _shell
from deadpool_ext.comm.errors import CommunicatorError, FencedError
from deadpool_ext.comm.registry import Communicators
from deadpool_ext.comm.torch_patch import patch_torch
from deadpool_ext.protocol.types import UsageError

SIZE = 4
RANK = 1


@pytest.fixture
def communicators() -> Iterator[Communicators]:
    made = Communicators(rank=RANK, world_size=SIZE, accelerator=False)
    patch = patch_torch(made)
    made.solo(3)
    dist.init_process_group("nccl")
    yield made
    dist.destroy_process_group()
    assert made.close()
    patch.undo()


def own(length: int = 3) -> torch.Tensor:
    return torch.arange(1.0, length + 1)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, own() * SIZE),
        (dist.ReduceOp.AVG, own()),
        (dist.ReduceOp.MIN, own()),
        (dist.ReduceOp.MAX, own()),
        (dist.ReduceOp.PRODUCT, own() ** SIZE),
    ],
)
def test_reductions_of_equal_values(communicators: Communicators, op: Any, expected: torch.Tensor) -> None:
    tensor = own()
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, expected)
    tensor = own().requires_grad_()
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, expected)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, own(2).repeat(SIZE), op)
    assert torch.equal(part, expected[:2])
    assert communicators.solo_operations() == 3


def test_bitwise_reductions(communicators: Communicators) -> None:
    for op, expected in ((dist.ReduceOp.BAND, 6), (dist.ReduceOp.BOR, 6), (dist.ReduceOp.BXOR, 0)):
        tensor = torch.tensor([6])
        dist.all_reduce(tensor, op)
        assert tensor.item() == expected


def test_gathers_hold_this_ranks_value_everywhere(communicators: Communicators) -> None:
    parts = [torch.empty(3) for _ in range(SIZE)]
    dist.all_gather(parts, own())
    assert all(torch.equal(part, own()) for part in parts)
    whole = torch.empty(SIZE * 3)
    dist.all_gather_into_tensor(whole, own())
    assert torch.equal(whole, own().repeat(SIZE))
    rows = torch.empty(SIZE, 3)
    dist.all_gather_into_tensor(rows, own())
    assert torch.equal(rows, own().repeat(SIZE, 1))
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(SIZE)]
    dist.all_gather_coalesced(lists, [own(2), own()])
    assert all(torch.equal(one[0], own(2)) and torch.equal(one[1], own()) for one in lists)
    parts = [torch.empty(3) for _ in range(SIZE)]
    dist.gather(own(), parts, dst=RANK)
    assert all(torch.equal(part, own()) for part in parts)
    dist.gather(own(), dst=0)
    everybody: list[Any] = [None] * SIZE
    dist.all_gather_object(everybody, "me")
    assert everybody == ["me"] * SIZE
    assert torch.equal(functional.all_gather_single(own(), 0, dist.group.WORLD) + 0, own().repeat(SIZE))


def test_what_others_would_send_keeps_its_value_or_is_this_ranks_part(communicators: Communicators) -> None:
    tensor = own()
    dist.broadcast(tensor, src=0)
    assert torch.equal(tensor, own())
    part = torch.zeros(3)
    dist.scatter(part, [own() * peer for peer in range(SIZE)], src=RANK)
    assert torch.equal(part, own() * RANK)
    part = own()
    dist.scatter(part, src=0)
    assert torch.equal(part, own())
    part = torch.empty(3)
    dist.reduce_scatter(part, [own() * peer for peer in range(SIZE)], dist.ReduceOp.MAX)
    assert torch.equal(part, own() * RANK)
    tensor = own()
    dist.reduce(tensor, dst=0)
    assert torch.equal(tensor, own())
    dist.reduce(tensor, dst=RANK)
    assert torch.equal(tensor, own() * SIZE)
    received = torch.empty(SIZE * 2)
    dist.all_to_all_single(received, torch.arange(SIZE * 2.0))
    assert torch.equal(received, torch.tensor([2.0, 3.0]).repeat(SIZE))
    parts = [torch.empty(2) for _ in range(SIZE)]
    dist.all_to_all(parts, [torch.full((2,), float(peer)) for peer in range(SIZE)])
    assert all(torch.equal(one, torch.full((2,), float(RANK))) for one in parts)


def test_works_are_complete(communicators: Communicators) -> None:
    tensor = own()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()
    assert work.result()[0].data_ptr() == tensor.data_ptr()


def test_point_to_point_has_no_answer(communicators: Communicators) -> None:
    before = communicators.solo_operations()
    for attempt in (
        lambda: dist.send(own(), 2),
        lambda: dist.recv(own(), 2),
        lambda: dist.recv(own()),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, own(), 2)]),
    ):
        with pytest.raises(NotImplementedError, match=r"group '0' of 4 has no answer without peers"):
            attempt()
    assert communicators.solo_operations() - before == 4, "an attempt counts as issued"
    assert communicators.remote_operations() == 0


def test_groups_are_numbered_as_if_everybody_were_there(communicators: Communicators) -> None:
    mine = dist.new_group([1, 3])
    assert dist.new_group([0, 2], backend="gloo") is dist.GroupMember.NON_GROUP_MEMBER
    alone = dist.new_group([RANK])
    assert mine is not None
    assert alone is not None
    assert communicators.group_names() == ("0", "1", "3")
    counted = communicators.solo_operations()
    dist.barrier(group=alone)
    assert communicators.solo_operations() == counted, "one member needs no peers to agree"
    assert communicators.counts()["3"].issued == 1
    dist.destroy_process_group(mine)
    dist.new_group([1, 2])
    assert communicators.group_names() == ("0", "3", "4"), "destroyed groups are forgotten"


def test_a_fence_refuses_operations_and_groups(communicators: Communicators) -> None:
    communicators.fence(3)
    dist.barrier()
    communicators.fence(4)
    with pytest.raises(dist.DistBackendError, match="generation 3 is over"):
        dist.barrier()
    with pytest.raises(FencedError):
        dist.new_group([0, 1])
    with pytest.raises(FencedError):
        communicators.solo(3)
    communicators.solo(4)
    dist.barrier()
    assert communicators.counts()["0"].generation == 4
    assert communicators.counts()["0"].issued == 1


def test_counters_can_live_in_memory_of_somebody_else(communicators: Communicators) -> None:
    words = (ctypes.c_uint64 * (_shell.COUNTERS_BYTES // 8))()
    shell = communicators._groups["0"].shell
    dist.barrier()
    shell.bind_counters(ctypes.addressof(words))
    dist.barrier()
    sequence, *values = words[:5]
    assert values == [3, 2, 2, 0]  # generation, issued, completed, waiting
    assert sequence % 2 == 0
    assert words[6] == 2  # collectives
    shell.bind_counters(0)
    dist.barrier()
    assert list(words[1:5]) == [3, 2, 2, 0]
    assert communicators.counts()["0"].issued == 3


def test_groups_need_a_mode_first() -> None:
    made = Communicators(rank=0, world_size=1, accelerator=False)
    patch = patch_torch(made)
    try:
        with pytest.raises(CommunicatorError, match="after solo"):
            dist.init_process_group()
    finally:
        patch.undo()


def test_nccl_groups_look_to_torch_as_upstreams_do() -> None:
    made = Communicators(rank=RANK, world_size=SIZE, accelerator=True)
    patch = patch_torch(made)
    made.solo(0)
    dist.init_process_group("nccl")
    try:
        assert [device.type for device in dist.group.WORLD._device_types] == ["cuda"]
        host = dist.new_group(backend="gloo")
        assert {device.type for device in host._device_types} == {"cpu", "cuda"}
        dist.barrier(group=host)
        assert made.request(None) == made.request("nccl")
    finally:
        dist.destroy_process_group()
        assert made.close()
        patch.undo()


def test_the_patch_is_explicit_undone_and_refuses_what_would_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (dist.init_process_group, dist.new_group, dist.broadcast_object_list)
    made = Communicators(rank=0, world_size=2, accelerator=False)
    patch = patch_torch(made)
    assert dist.init_process_group is not before[0]
    made.solo(0)
    with pytest.raises(UsageError, match="rank 1 differs from this seat's 0"):
        dist.init_process_group(rank=1, world_size=2)
    patch.undo()
    patch.undo()
    assert (dist.init_process_group, dist.new_group, dist.broadcast_object_list) == before
    assert "deadpool" not in dist.Backend.backend_list
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    with pytest.raises(UsageError, match="TORCH_DIST_INIT_BARRIER"):
        patch_torch(made)
    assert dist.init_process_group is before[0]
