"""Which peer seats host the replicas of a seat: the replication ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deadpool_ext.protocol.layout import node_domains
from deadpool_ext.protocol.types import Layout, Rank, UsageError

ReplicaMap = tuple[tuple[Rank, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unprotected:
    """Some seats have no peer in another failure domain.

    ``partial`` maps what can be protected (the empty tuple for the seats that cannot). ``reason`` is one line for the
    user, with a layout that would do.
    """

    seats: tuple[Rank, ...]
    reason: str
    partial: ReplicaMap


def replica_map(
    layout: Layout, seat_domains: Sequence[str] | None = None, replicas: int = 1
) -> ReplicaMap | Unprotected:
    """Index rank -> peer ranks whose nodes host its replicas, all in other failure domains than the rank.

    ``seat_domains``: index rank -> failure domain; None: the node. Each data-parallel group is rotated by the width
    of a domain, so every rank has one successor and hosts one replica (``replicas`` of each). Where one domain holds
    more than its share of a group no such rotation exists, and the load is spread evenly instead. With more replicas
    than one, the peers of a rank are also in domains different from each other.
    """
    if replicas < 1:
        raise UsageError(f"replicas={replicas} must be at least 1")
    domains = tuple(seat_domains) if seat_domains is not None else node_domains(layout)
    peers, missing = _map(layout.dp_groups, domains, replicas, layout.world_size)
    if not missing:
        return peers
    named = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
    return Unprotected(
        seats=missing,
        reason=(
            f"seats {named} have no data-parallel peer in {_count(replicas, 'other failure domain')}: "
            f"{_suggestion(layout, replicas, custom=seat_domains is not None)}"
        ),
        partial=peers,
    )


def _map(
    groups: Sequence[Sequence[Rank]], domains: Sequence[str], replicas: int, world_size: int
) -> tuple[ReplicaMap, tuple[Rank, ...]]:
    peers: list[tuple[Rank, ...]] = [()] * world_size
    missing: list[Rank] = []
    for group in groups:
        parts: dict[str, list[Rank]] = {}
        for rank in group:
            parts.setdefault(domains[rank], []).append(rank)
        if len(parts) <= replicas:
            missing.extend(group)
            continue
        widths = {len(part) for part in parts.values()}
        width = max(widths)
        line = [rank for part in parts.values() for rank in part]  # domains one after the other
        # Rotating by the widest part leaves every part, and wraps around into none, while it is at most half.
        if len(widths) == 1 or (replicas == 1 and 2 * width <= len(line)):
            for position, rank in enumerate(line):
                peers[rank] = tuple(line[(position + turn * width) % len(line)] for turn in range(1, replicas + 1))
        else:
            for rank, chosen in _balanced(parts, domains, replicas).items():
                peers[rank] = chosen
    return tuple(peers), tuple(sorted(missing))


def _balanced(parts: dict[str, list[Rank]], domains: Sequence[str], replicas: int) -> dict[Rank, tuple[Rank, ...]]:
    """Widest domains choose first, each rank the least loaded ranks elsewhere (ties: the ring order)."""
    load: Counter[Rank] = Counter()
    chosen: dict[Rank, tuple[Rank, ...]] = {}
    order = sorted(parts, key=lambda domain: -len(parts[domain]))
    line = [rank for domain in order for rank in parts[domain]]
    for position, rank in enumerate(line):
        used = {domains[rank]}
        mine: list[Rank] = []
        for _ in range(replicas):
            around = [line[(position + step) % len(line)] for step in range(1, len(line))]
            best = min((other for other in around if domains[other] not in used), key=lambda other: load[other])
            load[best] += 1
            used.add(domains[best])
            mine.append(best)
        chosen[rank] = tuple(mine)
    return chosen


def _suggestion(layout: Layout, replicas: int, *, custom: bool) -> str:
    """A layout that would protect every seat, as advice."""
    if not custom:
        for ranks_per_node in range(layout.ranks_per_node - 1, 0, -1):
            if layout.world_size % ranks_per_node == 0:
                other = replace(layout, ranks_per_node=ranks_per_node)
                if not _map(other.dp_groups, node_domains(other), replicas, other.world_size)[1]:
                    nodes = layout.world_size // ranks_per_node
                    return f"{_count(ranks_per_node, 'rank')} per node on {nodes} nodes would do"
    wanted = max(replicas + 1, layout.data_parallel + 1)
    return (
        f"use a data-parallel size of at least {wanted} that spans {replicas + 1} failure domains "
        f"(now {layout.data_parallel}, with {_count(layout.ranks_per_node, 'rank')} per node)"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
