"""The replication ring on layouts people use."""

from __future__ import annotations

import pytest

from deadpool_ext.protocol.layout import node_domains, node_key, plain_dp_groups, plain_layout, seats_of_node
from deadpool_ext.protocol.ring import Unprotected, replica_map
from deadpool_ext.protocol.types import UsageError


def test_dp4_on_two_ranks_a_node_is_one_to_one() -> None:
    layout = plain_layout(ranks_per_node=2, data_parallel=4)
    assert replica_map(layout) == ((2,), (3,), (0,), (1,))


def test_every_group_rotates_within_itself() -> None:
    layout = plain_layout(ranks_per_node=2, tensor_parallel=2, data_parallel=2, pipeline_parallel=2)
    assert layout.dp_groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert replica_map(layout) == ((2,), (3,), (0,), (1,), (6,), (7,), (4,), (5,))


def test_racks_as_domains() -> None:
    layout = plain_layout(ranks_per_node=1, data_parallel=4)
    assert replica_map(layout, ("a", "a", "b", "b")) == ((2,), (3,), (0,), (1,))
    assert replica_map(layout, ("a", "b", "a", "b")) == ((1,), (0,), (3,), (2,))


def test_unequal_domains_share_the_load() -> None:
    layout = plain_layout(ranks_per_node=1, data_parallel=5)
    peers = replica_map(layout, ("a", "a", "a", "b", "c"))
    assert not isinstance(peers, Unprotected)
    hosted = [peer for (peer,) in peers]
    assert set(hosted[:3]) == {3, 4}
    assert max(hosted.count(rank) for rank in range(5)) == 2


def test_two_replicas_are_in_two_other_domains() -> None:
    layout = plain_layout(ranks_per_node=1, data_parallel=3)
    assert replica_map(layout, replicas=2) == ((1, 2), (2, 0), (0, 1))


def test_a_group_inside_one_node_is_unprotected_and_told_what_would_do() -> None:
    layout = plain_layout(ranks_per_node=4, tensor_parallel=2, data_parallel=2, pipeline_parallel=2)
    result = replica_map(layout)
    assert isinstance(result, Unprotected)
    assert result.seats == tuple(range(8))
    assert result.partial == ((),) * 8
    assert "2 ranks per node on 4 nodes would do" in result.reason


def test_without_data_parallelism_nothing_can_be_protected() -> None:
    result = replica_map(plain_layout(ranks_per_node=1, tensor_parallel=2))
    assert isinstance(result, Unprotected)
    assert "data-parallel size of at least 2" in result.reason


def test_replicas_must_be_positive() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        replica_map(plain_layout(ranks_per_node=1, data_parallel=2), replicas=0)


def test_layout_helpers() -> None:
    layout = plain_layout(ranks_per_node=2, data_parallel=4)
    assert seats_of_node(layout, 1) == (2, 3)
    assert node_domains(layout) == ("0", "0", "1", "1")
    assert plain_dp_groups(tensor_parallel=1, data_parallel=2, pipeline_parallel=2) == ((0, 1), (2, 3))
    assert sorted(["n10", "n2", "m3"], key=node_key) == ["m3", "n2", "n10"]
    with pytest.raises(UsageError, match="do not fill"):
        plain_layout(ranks_per_node=3, data_parallel=4)
