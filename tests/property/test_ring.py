"""The replication ring against a naive model: one-to-one whenever that is possible, balanced otherwise."""

from __future__ import annotations

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.ring import Unprotected, replica_map
from deadpool_ext.protocol.types import Layout

DOMAINS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


def one_group(size: int) -> Layout:
    return plain_layout(ranks_per_node=1, data_parallel=size)


@given(DOMAINS, st.integers(1, 3))
def test_one_group_over_any_domains(domains: list[str], replicas: int) -> None:
    parts = Counter(domains)
    result = replica_map(one_group(len(domains)), domains, replicas)
    if len(parts) <= replicas:
        assert isinstance(result, Unprotected)
        assert result.seats == tuple(range(len(domains)))
        return
    assert not isinstance(result, Unprotected)
    load = Counter(peer for peers in result for peer in peers)
    for rank, peers in enumerate(result):
        assert len(peers) == replicas
        assert len({domains[rank], *(domains[peer] for peer in peers)}) == replicas + 1, "all in different domains"
    if replicas == 1:
        widest = max(parts.values())
        others = len(domains) - widest
        # Hall: a one-to-one map into other domains exists exactly if no domain holds more than half.
        best = 1 if widest <= others else ceil(widest / others)
        assert max(load.values()) == best


@given(
    tensor=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 3, 4]),
    pipeline=st.sampled_from([1, 2]),
    per_node=st.sampled_from([1, 2, 4, 8]),
)
def test_whole_layouts(tensor: int, data: int, pipeline: int, per_node: int) -> None:
    if tensor * data * pipeline % per_node:
        return
    layout = plain_layout(
        ranks_per_node=per_node, tensor_parallel=tensor, data_parallel=data, pipeline_parallel=pipeline
    )
    result = replica_map(layout)
    groups = {rank: group for group in layout.dp_groups for rank in group}
    for rank, peers in enumerate(result.partial if isinstance(result, Unprotected) else result):
        inside = len({other // per_node for other in groups[rank]}) == 1
        assert inside == (peers == ())
        for peer in peers:
            assert peer in groups[rank] and peer // per_node != rank // per_node
    if isinstance(result, Unprotected):
        assert result.seats and result.reason
    elif per_node <= tensor or (tensor == 1 and data % per_node == 0):  # equal parts
        assert sorted(peer for (peer,) in result) == list(range(layout.world_size))
