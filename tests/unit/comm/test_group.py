"""Backend strings, the order in which groups connect, and their digests."""

from __future__ import annotations

from typing import Any

import pytest

from deadpool_ext.comm.group import BackendRequest, GroupSpec, parse_backend
from deadpool_ext.protocol.types import UsageError

GLOO = BackendRequest(by_device=(("cpu", "gloo"),))
NCCL = BackendRequest(by_device=(("cuda", "nccl"),))
BOTH = BackendRequest(by_device=(("cpu", "gloo"), ("cuda", "nccl")))


def spec(name: str = "0", **changes: Any) -> GroupSpec:
    fields: dict[str, Any] = {"name": name, "ranks": (0, 1), "group_rank": 0, "request": GLOO} | changes
    return GroupSpec(**fields)


@pytest.mark.parametrize(
    ("backend", "with_gpu"),
    [
        ("gloo", GLOO),
        ("nccl", NCCL),
        ("NCCL", NCCL),
        ("cpu:gloo,cuda:nccl", BOTH),
        ("cuda:nccl", NCCL),
        ("cpu:gloo", GLOO),
        (None, BOTH),
        ("undefined", BOTH),
        ("deadpool", BOTH),
    ],
)
def test_backends_of_upstream_are_understood(backend: str | None, with_gpu: BackendRequest) -> None:
    assert parse_backend(backend, accelerator=True) == with_gpu
    assert parse_backend(backend, accelerator=False) == GLOO


@pytest.mark.parametrize("backend", [None, "deadpool", "cuda:deadpool"])
def test_no_backend_means_the_default_groups(backend: str | None) -> None:
    assert parse_backend(backend, accelerator=True, default=NCCL) == NCCL


@pytest.mark.parametrize("backend", ["mpi", "cpu:gloo,cuda:ucc", "fake"])
def test_what_cannot_be_replaced_is_refused(backend: str) -> None:
    with pytest.raises(UsageError, match="cannot be replaced in place"):
        parse_backend(backend, accelerator=False)


def test_torch_gets_the_device_types_that_upstream_would_give_the_group() -> None:
    assert NCCL.torch_name == "cuda:deadpool"
    assert GLOO.torch_name == BOTH.torch_name == "deadpool"


def test_groups_connect_in_the_order_of_their_numbers_and_hashed_names_last() -> None:
    names = ["10", "2", "f3a", "0", "0b1c"]
    assert [one.name for one in sorted(map(spec, names), key=lambda one: one.order)] == ["0", "2", "10", "0b1c", "f3a"]


def test_digests_tell_members_names_and_communicators_apart_but_not_ranks_of_the_same_group() -> None:
    base = spec()
    assert base.digest == spec(group_rank=1).digest
    others = [spec("1"), spec(ranks=(1, 0)), spec(ranks=(0, 1, 2)), spec(request=BOTH)]
    assert len({base.digest, *(one.digest for one in others)}) == 5
