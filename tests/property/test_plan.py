"""The plan against a brute-force model of what can be restored from where."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.plan import BadCopy, NodeInventory, make_plan
from deadpool_ext.protocol.ring import Unprotected, replica_map
from deadpool_ext.protocol.types import NoPlan, RecoveryPlan, SlotInfo, SourceKind, Version, WorkerState

VERSIONS = [Version(v=v, lineage=lineage) for v in (3, 4, 5) for lineage in (0, 1)]
LAYOUTS = [
    plain_layout(ranks_per_node=1, data_parallel=2),
    plain_layout(ranks_per_node=2, data_parallel=4),
    plain_layout(ranks_per_node=2, tensor_parallel=2, data_parallel=2, pipeline_parallel=2),
]


@st.composite
def situations(draw: st.DrawFn) -> dict:
    layout = draw(st.sampled_from(LAYOUTS))
    ring = replica_map(layout)
    assert not isinstance(ring, Unprotected)
    nodes = [f"n{rank // layout.ranks_per_node}" for rank in range(layout.world_size)]
    names = list(dict.fromkeys(nodes))
    lost = draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    seat_nodes = [f"s{node}" if node in lost else node for node in nodes]
    dead = draw(st.sets(st.integers(0, layout.world_size - 1), max_size=2))
    new = {rank for rank, node in enumerate(nodes) if node in lost or rank in dead}
    held = st.sets(st.sampled_from(VERSIONS), max_size=3)
    likely = draw(st.sampled_from(VERSIONS))

    def some(rank: int) -> tuple[SlotInfo, ...]:
        versions = draw(held) | ({likely} if draw(st.integers(0, 9)) else set())
        return tuple(SlotInfo(rank=rank, version=version, layout_digest="d") for version in sorted(versions))

    inventories = {
        node: NodeInventory(
            own=tuple(slot for rank, holder in enumerate(nodes) if holder == node for slot in some(rank)),
            hosted=tuple(
                slot
                for rank, peers in enumerate(ring)
                if any(nodes[peer] == node for peer in peers)
                for slot in some(rank)
            ),
        )
        for node in names
        if node not in lost
    }
    workers = {
        rank: WorkerState(rank=rank, live=draw(st.sampled_from([None, likely, *VERSIONS])), dirty=draw(st.booleans()))
        for rank in range(layout.world_size)
        if rank not in new
    }
    copies = [
        BadCopy(node=node, rank=slot.rank, version=slot.version, own=own)
        for node, inventory in inventories.items()
        for own, slots in ((False, inventory.hosted), (True, inventory.own))
        for slot in slots
    ]
    bad = set(draw(st.lists(st.sampled_from(copies), max_size=3)) if copies else [])
    return {
        "layout": layout,
        "replica_map": ring,
        "seat_nodes": tuple(seat_nodes),
        "inventories": inventories,
        "workers": workers,
        "new_workers": new,
        "bad_copies": bad,
    }


def options(situation: dict, rank: int, target: Version) -> set[tuple[SourceKind, str | None]]:
    """Every way to give ``rank`` the version, straight from the definition."""
    found: set[tuple[SourceKind, str | None]] = set()
    node = situation["seat_nodes"][rank]
    for name, inventory in situation["inventories"].items():
        for slot in inventory.own:
            bad = BadCopy(node=name, rank=rank, version=target, own=True) in situation["bad_copies"]
            if slot.rank == rank and slot.version == target and name == node and not bad:
                found.add((SourceKind.OWN_SLOT, None))
                worker = situation["workers"].get(rank)
                if worker is not None and worker.live == target and not worker.dirty:
                    found.add((SourceKind.KEEP, None))
        for slot in inventory.hosted:
            bad = BadCopy(node=name, rank=rank, version=target) in situation["bad_copies"]
            if slot.rank == rank and slot.version == target and not bad:
                found.add((SourceKind.REPLICA, name))
    return found


@settings(max_examples=300)
@given(situations())
def test_plan_is_executable_newest_and_deterministic(situation: dict) -> None:
    result = make_plan(generation=7, **situation)
    assert result == make_plan(generation=7, **situation)
    ranks = range(situation["layout"].world_size)
    possible = [v for v in VERSIONS if all(options(situation, rank, v) for rank in ranks)]
    if not possible:
        event("no plan")
        assert isinstance(result, NoPlan)
        assert result.seats and result.reason
        return
    event("plan")
    assert isinstance(result, RecoveryPlan)
    assert result.target == max(possible), "the newest version of one lineage (INV-1)"
    assert [seat.rank for seat in result.seats] == list(ranks)
    for seat in result.seats:
        ways = options(situation, seat.rank, result.target)
        assert (seat.source, seat.source_node) in ways, "INV-2: only what is sealed and verified"
        assert seat.node == situation["seat_nodes"][seat.rank]
        assert seat.new_worker == (seat.rank in situation["new_workers"])
        for better in (SourceKind.KEEP, SourceKind.OWN_SLOT):
            if (better, None) in ways:
                assert seat.source == better
                break
