"""Every kind of operation through the shell gives bit for bit what plain gloo gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo  # what functional collectives import at their first use: once, before the forks
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from deadpool_ext.comm.registry import Communicators
from deadpool_ext.comm.torch_patch import patch_torch

WORLD = [0, 1, 2]
SIZE = len(WORLD)


def noise(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + rank))


def exercise(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """One of everything; values are tensors, lists of tensors or plain objects."""
    seen: dict[str, Any] = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        tensor = noise(rank, 33)
        dist.all_reduce(tensor, op, group=group)
        seen[f"all_reduce {op}"] = tensor
    tensor = noise(rank, 5).to(torch.bfloat16)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work.wait()
    assert work.is_completed()
    seen["async"] = tensor
    tensor = noise(rank, 5)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    seen["future"] = future.then(lambda done: done.value()[0] * 2).wait()

    tensor = noise(rank, 4)
    dist.broadcast(tensor, 1, group=group)
    seen["broadcast"] = tensor
    tensor = noise(rank, 4)
    dist.reduce(tensor, 2, group=group)
    seen["reduce"] = tensor if rank == 2 else None
    parts = [torch.empty(3) for _ in WORLD]
    dist.all_gather(parts, noise(rank, 3), group=group)
    seen["all_gather"] = parts
    whole = torch.empty(SIZE * 3)
    dist.all_gather_into_tensor(whole, noise(rank, 3), group=group)
    seen["all_gather_into_tensor"] = whole
    lists = [[torch.empty(2), torch.empty(3)] for _ in WORLD]
    dist.all_gather_coalesced(lists, [noise(rank, 2), noise(rank, 3)], group=group)
    seen["all_gather_coalesced"] = [tensor for part in lists for tensor in part]
    parts = [torch.empty(3) for _ in WORLD] if rank == 0 else None
    dist.gather(noise(rank, 3), parts, dst=0, group=group)
    seen["gather"] = parts
    mine = torch.empty(3)
    dist.scatter(mine, [noise(10 + peer, 3) for peer in WORLD] if rank == 1 else None, src=1, group=group)
    seen["scatter"] = mine
    mine = torch.empty(3)
    dist.reduce_scatter(mine, [noise(rank * 10 + peer, 3) for peer in WORLD], group=group)
    seen["reduce_scatter"] = mine
    mine = torch.empty(3)
    dist.reduce_scatter_tensor(mine, noise(rank, SIZE * 3), group=group)
    seen["reduce_scatter_tensor"] = mine
    whole = torch.empty(SIZE * 2)
    dist.all_to_all_single(whole, noise(rank, SIZE * 2), group=group)
    seen["all_to_all_single"] = whole
    sizes = [rank + 1] * SIZE
    whole = torch.empty(sum(peer + 1 for peer in WORLD))
    dist.all_to_all_single(whole, noise(rank, sum(sizes)), [peer + 1 for peer in WORLD], sizes, group=group)
    seen["all_to_all_single uneven"] = whole
    parts = [torch.empty(2) for _ in WORLD]
    dist.all_to_all(parts, [noise(rank * 10 + peer, 2) for peer in WORLD], group=group)
    seen["all_to_all"] = parts
    dist.barrier(group=group)
    group.monitored_barrier()  # the function above it asks for the name "gloo"

    with _coalescing_manager(group, async_ops=True) as manager:
        several = [noise(rank, 3), noise(rank + 5, 4)]
        for tensor in several:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    seen["coalesced all_reduce"] = several
    with _coalescing_manager(group):
        several = [torch.empty(SIZE * 2), torch.empty(SIZE * 3)]
        for length, tensor in zip((2, 3), several, strict=True):
            dist.all_gather_into_tensor(tensor, noise(rank, length), group=group)
    seen["coalesced all_gather"] = several
    with _coalescing_manager(group):
        several = [torch.empty(2), torch.empty(3)]
        for length, tensor in zip((2, 3), several, strict=True):
            dist.reduce_scatter_tensor(tensor, noise(rank, SIZE * length), group=group)
    seen["coalesced reduce_scatter"] = several

    right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
    tensor = torch.empty(4)
    request = dist.irecv(tensor, left, group=group, tag=7)
    dist.send(noise(rank, 4), right, group=group, tag=7)
    assert request is not None
    request.wait()
    seen["send/irecv"] = tensor
    tensor = torch.empty(4)
    sending = dist.isend(noise(rank, 4), right, group=group)
    seen["any source"] = dist.recv(tensor, group=group)
    assert sending is not None
    sending.wait()
    seen["recv any"] = tensor
    tensor = torch.empty(4)
    operations = [
        dist.P2POp(dist.isend, noise(rank, 4), right, group),
        dist.P2POp(dist.irecv, tensor, left, group),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    seen["batch"] = tensor

    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    seen["all_gather_object"] = objects
    objects = [f"from {rank}", rank]
    dist.broadcast_object_list(objects, 1, group=group)
    seen["broadcast_object_list"] = objects
    gathered: list[Any] | None = [None] * SIZE if rank == 0 else None
    dist.gather_object(rank * 11, gathered, dst=0, group=group)
    seen["gather_object"] = gathered
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {peer}" for peer in WORLD] if rank == 0 else None, 0, group=group)
    seen["scatter_object_list"] = scattered

    seen["functional all_reduce"] = functional.all_reduce(noise(rank, 3), "sum", group) + 0
    seen["functional all_gather"] = functional.all_gather_single(noise(rank, 3), 0, group) + 0
    seen["functional reduce_scatter"] = functional.reduce_scatter_single(noise(rank, SIZE * 3), "sum", 0, group) + 0

    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(noise(index, *parameter.shape))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    wrapped(noise(rank, 3, 4)).square().mean().backward()
    seen["DDP gradients"] = [parameter.grad for parameter in model.parameters()]
    return seen


def through_the_shell(rank: int, link: Any, *, eventually: Any) -> dict[str, Any]:
    communicators = Communicators(rank=rank, world_size=SIZE)
    patch = patch_torch(communicators)
    link.connect(communicators, 0, hosts=rank == 0)
    dist.init_process_group("nccl")  # on a machine without GPUs this is gloo, too
    group = dist.new_group(WORLD, backend="cpu:gloo,cuda:nccl")
    seen = exercise(rank, group)
    # DDP waits for futures, which wake their waiters before they call back.
    eventually(lambda: communicators.counts()["1"].completed == communicators.counts()["1"].issued)
    counts = communicators.counts()
    assert list(counts) == ["0", "1"]
    assert counts["1"].issued > 40
    assert counts["1"].waiting == 0
    assert communicators.remote_operations() == sum(one.issued for one in counts.values())
    assert communicators.solo_operations() == 0
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match="destroyed"):
        group.barrier()
    patch.undo()
    return seen


def plain(rank: int, link: Any, *, port: int) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    return exercise(rank, dist.new_group(WORLD))


def test_every_operation_equals_plain_gloo(ranks: Any, eventually: Any) -> None:
    ranks.start(WORLD, functools.partial(through_the_shell, eventually=eventually))
    ranks.relay_port(0, WORLD)
    ours = ranks.results(WORLD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.end()
    ranks.start(WORLD, functools.partial(plain, port=store.port))
    theirs = ranks.results(WORLD)
    for rank in WORLD:
        assert ours[rank].keys() == theirs[rank].keys()
        for name, value in ours[rank].items():
            assert same(value, theirs[rank][name]), f"{name} on rank {rank}: {value} != {theirs[rank][name]}"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
