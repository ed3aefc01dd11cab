"""The recovery plan by example; tests/property checks it against a naive model."""

from __future__ import annotations

import pytest

from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.plan import BadCopy, NodeInventory, make_plan
from deadpool_ext.protocol.types import (
    InvariantError,
    NoPlan,
    RecoveryPlan,
    SlotInfo,
    SourceKind,
    Version,
    WorkerState,
)

LAYOUT = plain_layout(ranks_per_node=1, data_parallel=3)
RING = ((1,), (2,), (0,))


def ver(v: int, lineage: int = 0) -> Version:
    return Version(v=v, lineage=lineage)


def slot(rank: int, version: Version, digest: str = "d") -> SlotInfo:
    return SlotInfo(rank=rank, version=version, layout_digest=digest)


def state(rank: int, live: Version | None, dirty: bool = False) -> WorkerState:
    return WorkerState(rank=rank, live=live, dirty=dirty)


def test_lost_seat_comes_from_its_replica_and_clean_survivors_keep() -> None:
    plan = make_plan(
        generation=1,
        layout=LAYOUT,
        seat_nodes=("a", "x", "c"),
        replica_map=RING,
        inventories={
            "a": NodeInventory(own=(slot(0, ver(4)), slot(0, ver(5))), hosted=(slot(2, ver(5)),)),
            "c": NodeInventory(own=(slot(2, ver(4)), slot(2, ver(5))), hosted=(slot(1, ver(4)), slot(1, ver(5)))),
        },
        workers={0: state(0, ver(5)), 2: state(2, ver(5), dirty=True)},
        new_workers={1},
    )
    assert isinstance(plan, RecoveryPlan)
    assert plan.target == ver(5)
    assert [seat.source for seat in plan.seats] == [SourceKind.KEEP, SourceKind.REPLICA, SourceKind.OWN_SLOT]
    assert [seat.new_worker for seat in plan.seats] == [False, True, False]
    assert plan.seats[1].source_node == "c"
    assert "1 keep, 1 own_slot, 1 replica" in plan.reason


def test_equal_iterations_of_different_lineages_are_not_mixed() -> None:
    result = make_plan(
        generation=2,
        layout=LAYOUT,
        seat_nodes=("a", "b", "c"),
        replica_map=RING,
        inventories={
            "a": NodeInventory(own=(slot(0, ver(5, 0)), slot(0, ver(4)))),
            "b": NodeInventory(own=(slot(1, ver(5, 1)), slot(1, ver(4)))),
            "c": NodeInventory(own=(slot(2, ver(5, 1)), slot(2, ver(4)))),
        },
        workers={0: state(0, ver(5, 0)), 1: state(1, ver(5, 1)), 2: state(2, ver(5, 1))},
        new_workers=(),
    )
    assert isinstance(result, RecoveryPlan)
    assert result.target == ver(4)
    assert "newer iteration 5 of lineage 1 is not held for every seat" in result.reason


def test_live_tensors_without_a_sealed_slot_do_not_count() -> None:
    result = make_plan(
        generation=1,
        layout=LAYOUT,
        seat_nodes=("a", "b", "c"),
        replica_map=RING,
        inventories={
            "a": NodeInventory(own=(slot(0, ver(4)),)),
            "b": NodeInventory(own=(slot(1, ver(4)), slot(1, ver(5)))),
            "c": NodeInventory(own=(slot(2, ver(4)), slot(2, ver(5)))),
        },
        workers={rank: state(rank, ver(5)) for rank in range(3)},
        new_workers=(),
    )
    assert isinstance(result, RecoveryPlan) and result.target == ver(4)


def test_fetches_are_spread_and_bad_copies_and_foreign_layouts_are_left_out() -> None:
    layout = plain_layout(ranks_per_node=2, data_parallel=4)
    hosted = (slot(2, ver(1)), slot(3, ver(1)))
    common = {
        "generation": 1,
        "layout": layout,
        "seat_nodes": ("a", "a", "x", "x"),
        "replica_map": ((2,), (3,), (0,), (1,)),
        "workers": {0: state(0, ver(1)), 1: state(1, ver(1))},
        "new_workers": {2, 3},
    }
    own = (slot(0, ver(1)), slot(1, ver(1)))
    inventories = {"a": NodeInventory(own=own, hosted=hosted), "b": NodeInventory(hosted=hosted)}
    plan = make_plan(**common, inventories=inventories)  # type: ignore[arg-type]
    assert isinstance(plan, RecoveryPlan)
    assert [seat.source_node for seat in plan.seats] == [None, None, "a", "b"]

    bad = {BadCopy(node="a", rank=2, version=ver(1))}
    plan = make_plan(**common, inventories=inventories, bad_copies=bad)  # type: ignore[arg-type]
    assert isinstance(plan, RecoveryPlan)
    assert [seat.source_node for seat in plan.seats] == [None, None, "b", "a"]

    bad.add(BadCopy(node="b", rank=2, version=ver(1)))
    refusal = make_plan(**common, inventories=inventories, bad_copies=bad)  # type: ignore[arg-type]
    assert isinstance(refusal, NoPlan)
    assert refusal.seats == (2,)
    assert "seat 2 (now x; replicas belong with seat 0 now on a, refused as corrupt from a, b)" in refusal.reason

    digests = {0: "d", 1: "d", 2: "other", 3: "d"}
    refusal = make_plan(**common, inventories=inventories, digests=digests)  # type: ignore[arg-type]
    assert isinstance(refusal, NoPlan) and refusal.seats == (2,)


def test_refusal_names_the_version_that_comes_closest() -> None:
    refusal = make_plan(
        generation=1,
        layout=LAYOUT,
        seat_nodes=("a", "b", "c"),
        replica_map=RING,
        inventories={
            "a": NodeInventory(own=(slot(0, ver(3)),)),
            "b": NodeInventory(own=(slot(1, ver(3)),)),
            "c": NodeInventory(own=(slot(2, ver(2)),)),
        },
        workers={rank: state(rank, None, dirty=True) for rank in range(3)},
        new_workers=(),
    )
    assert isinstance(refusal, NoPlan)
    assert refusal.seats == (2,)
    assert "iteration 3 of lineage 0 lacks seats [2]" in refusal.reason


def test_a_seat_without_any_worker_breaks_the_contract() -> None:
    with pytest.raises(InvariantError, match=r"seats \[1, 2\]"):
        make_plan(
            generation=1,
            layout=LAYOUT,
            seat_nodes=("a", "b", "c"),
            replica_map=RING,
            inventories={},
            workers={0: state(0, None)},
            new_workers=(),
        )
