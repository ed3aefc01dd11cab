"""The flat shard: what differs from a sealed copy."""

from __future__ import annotations

import pytest
import torch

from megatron.hotswap.state.shards import Entry, FlatShards


def shards() -> FlatShards:
    """A flat buffer of two entries, and two tensors of their own, as a model with fp32 parameters has them."""
    made = FlatShards.__new__(FlatShards)
    flat = torch.arange(16, dtype=torch.float32)
    made.flats = [flat]
    made.entries = [
        Entry("a", "main", torch.ones(6)),
        Entry("a", "exp_avg", flat[:6]),
        Entry("a", "exp_avg_sq", flat[8:14]),
        Entry("bias", "buffer", torch.zeros(3)),
    ]
    return made


def sealed(made: FlatShards) -> memoryview:
    return memoryview(b"".join(piece.numpy().tobytes() for piece in made.pieces())).toreadonly()


@pytest.mark.parametrize(("entry", "found"), [(0, ["a main"]), (1, ["a exp_avg"]), (2, ["a exp_avg_sq"]), (3, [])])
def test_entries_that_differ_are_named_and_buffers_may(entry: int, found: list[str]) -> None:
    made = shards()
    raw = sealed(made)
    assert made.differences(raw) == []
    made.entries[entry].tensor.view(torch.uint8)[5] ^= 1
    assert made.differences(raw) == found
