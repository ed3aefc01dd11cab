"""The recovery plan: a pure function of who sits where now and what is held where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from deadpool_ext.protocol.layout import node_key
from deadpool_ext.protocol.types import (
    Layout,
    NodeId,
    NoPlan,
    Rank,
    RecoveryPlan,
    SeatPlan,
    SlotInfo,
    SourceKind,
    Version,
    WorkerState,
    invariant,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInventory:
    """Sealed slots of one live node, taken with its slots frozen: its seats' own, and replicas it hosts."""

    own: tuple[SlotInfo, ...] = ()
    hosted: tuple[SlotInfo, ...] = ()


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class BadCopy:
    """A copy that could not be installed once: never used again (until it is written anew)."""

    node: NodeId
    rank: Rank
    version: Version
    own: bool = False  # the seat's own slot; else a hosted replica


@dataclass(frozen=True, slots=True)
class _Holdings:
    """Who holds which version: own[(rank, version)] and hosted[(rank, version)] -> nodes."""

    own: Mapping[tuple[Rank, Version], frozenset[NodeId]]
    hosted: Mapping[tuple[Rank, Version], frozenset[NodeId]]


def make_plan(
    *,
    generation: int,
    layout: Layout,
    seat_nodes: Sequence[NodeId],
    replica_map: Sequence[Sequence[Rank]],
    inventories: Mapping[NodeId, NodeInventory],
    workers: Mapping[Rank, WorkerState],
    new_workers: Collection[Rank],
    bad_copies: Collection[BadCopy] = (),
    digests: Mapping[Rank, str] | None = None,
) -> RecoveryPlan | NoPlan:
    """The newest version of one lineage that every seat can be restored to, and from where (INV-1).

    ``seat_nodes``: index rank -> node in the new generation. ``inventories``: of the live nodes. ``workers``: the
    unwound survivors; a rank that is neither there nor in ``new_workers`` breaks the call's contract.
    ``digests``: layout digest by rank; a slot with another one does not count. A surviving seat keeps its live
    tensors only if its own slot of the target is sealed too, because the slot holds the metadata (RNG, schedule,
    data cursor) that belongs to it. ``replica_map`` only serves the words of a refusal.
    """
    ranks = range(layout.world_size)
    missing = [rank for rank in ranks if rank not in workers and rank not in new_workers]
    invariant(not missing, f"seats {missing} have neither a surviving nor a new worker")
    holdings = _holdings(inventories, frozenset(bad_copies), digests)
    versions = sorted({version for _, version in (*holdings.own, *holdings.hosted)}, reverse=True)
    for target in versions:
        seats = _seats_for(target, seat_nodes, holdings, workers, frozenset(new_workers))
        if seats is not None:
            return RecoveryPlan(
                generation=generation, target=target, seats=seats, reason=_reason(target, versions[0], seats)
            )
    return _refusal(ranks, versions, seat_nodes, replica_map, holdings, frozenset(bad_copies))


def _holdings(
    inventories: Mapping[NodeId, NodeInventory], bad_copies: frozenset[BadCopy], digests: Mapping[Rank, str] | None
) -> _Holdings:
    own: dict[tuple[Rank, Version], set[NodeId]] = {}
    hosted: dict[tuple[Rank, Version], set[NodeId]] = {}
    for node, inventory in inventories.items():
        for slots, table in ((inventory.own, own), (inventory.hosted, hosted)):
            for slot in slots:
                if digests is not None and digests.get(slot.rank) != slot.layout_digest:
                    continue
                if BadCopy(node=node, rank=slot.rank, version=slot.version, own=table is own) in bad_copies:
                    continue
                table.setdefault((slot.rank, slot.version), set()).add(node)
    return _Holdings(
        {key: frozenset(nodes) for key, nodes in own.items()},
        {key: frozenset(nodes) for key, nodes in hosted.items()},
    )


def _seats_for(
    target: Version,
    seat_nodes: Sequence[NodeId],
    holdings: _Holdings,
    workers: Mapping[Rank, WorkerState],
    new_workers: frozenset[Rank],
) -> tuple[SeatPlan, ...] | None:
    """A source of ``target`` for every seat, or None if one has none."""
    seats: list[SeatPlan] = []
    busy: Counter[NodeId] = Counter()  # fetches that a node serves in this plan
    for rank, node in enumerate(seat_nodes):
        new = rank in new_workers
        if node in holdings.own.get((rank, target), ()):
            state = None if new else workers[rank]
            keep = state is not None and state.live == target and not state.dirty
            kind = SourceKind.KEEP if keep else SourceKind.OWN_SLOT
            seats.append(SeatPlan(rank=rank, node=node, new_worker=new, source=kind))
            continue
        hosts = holdings.hosted.get((rank, target), frozenset())
        if not hosts:
            return None
        # Another node before the seat's own, the least busy first, then by name: the same answer every time.
        host = min(hosts, key=lambda name: (name == node, busy[name], node_key(name)))
        busy[host] += 1
        seats.append(SeatPlan(rank=rank, node=node, new_worker=new, source=SourceKind.REPLICA, source_node=host))
    return tuple(seats)


def _reason(target: Version, newest: Version, seats: Sequence[SeatPlan]) -> str:
    counts = Counter(seat.source for seat in seats)
    parts = [f"{counts[kind]} {kind.value}" for kind in SourceKind if counts[kind]]
    older = "" if target == newest else f" (newer {_name(newest)} is not held for every seat)"
    return f"newest version held for every seat is {_name(target)}{older}: {', '.join(parts)}"


def _refusal(
    ranks: range,
    versions: Sequence[Version],
    seat_nodes: Sequence[NodeId],
    replica_map: Sequence[Sequence[Rank]],
    holdings: _Holdings,
    bad_copies: frozenset[BadCopy],
) -> NoPlan:
    def held(rank: Rank, version: Version) -> bool:
        return seat_nodes[rank] in holdings.own.get((rank, version), ()) or (rank, version) in holdings.hosted

    bare = tuple(rank for rank in ranks if not any(held(rank, version) for version in versions))
    if bare:
        words = "; ".join(_whereabouts(rank, seat_nodes, replica_map, bad_copies) for rank in bare[:4])
        more = f"; and {len(bare) - 4} more seats" if len(bare) > 4 else ""
        return NoPlan(reason=f"no sealed copy of any version is left: {words}{more}", seats=bare)
    # Every seat has something, but nothing that all share: name the version that the fewest seats lack.
    lacking = {version: tuple(rank for rank in ranks if not held(rank, version)) for version in versions}
    best = min(versions, key=lambda version: len(lacking[version]))  # ``versions`` is newest first
    spoilt = [f"seat {rank}{_spoilt(rank, bad_copies)}" for rank in lacking[best] if _spoilt(rank, bad_copies)]
    what = f"no version of one lineage is held for every seat: {_name(best)} lacks seats {list(lacking[best])}"
    return NoPlan(reason="; ".join([what, *spoilt]), seats=lacking[best])


def _whereabouts(
    rank: Rank, seat_nodes: Sequence[NodeId], replica_map: Sequence[Sequence[Rank]], bad_copies: frozenset[BadCopy]
) -> str:
    peers = replica_map[rank]
    hosts = ", ".join(f"with seat {peer} now on {seat_nodes[peer]}" for peer in peers) or "nowhere (unprotected)"
    return f"seat {rank} (now {seat_nodes[rank]}; replicas belong {hosts}{_spoilt(rank, bad_copies)})"


def _spoilt(rank: Rank, bad_copies: frozenset[BadCopy]) -> str:
    bad = sorted({copy.node for copy in bad_copies if copy.rank == rank})
    return f", refused as corrupt from {', '.join(bad)}" if bad else ""


def _name(version: Version) -> str:
    return f"iteration {version.v} of lineage {version.lineage}"
