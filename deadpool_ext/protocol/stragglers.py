"""Nodes that are slow: their ranks need longer for a step of their own work than other nodes' ranks for the same work.

What a rank needs is its busy time (:mod:`~deadpool_ext.protocol.pace`): a rank that waits for a slow one is not slow.
The same work is that of its data-parallel group; where the group has nobody on another node, any rank elsewhere stands
in for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deadpool_ext.protocol import planned
from deadpool_ext.protocol.state import Job
from deadpool_ext.protocol.types import Layout, NodeId, Rank, UsageError

STEPS: Final = 10  # in a row that a node has to be slow in
REPORT_FACTOR: Final = 1.5  # from here on it is reported, where no other factor is asked for
FORGET_S: Final = 600.0  # so long must a node not be slow to be reported again
COOL_DOWN_S: Final = 600.0  # between two swaps for this reason
NOISE_S: Final = 0.02  # a smaller difference is nobody's fault
POLICY: Final = "swap_slower_than"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slow:
    """A slow node. ``busy_s`` and ``others_s``: median seconds of a step, its own and of others for the same work."""

    node: NodeId
    busy_s: float
    others_s: float

    @property
    def reason(self) -> str:
        """One line for people."""
        times = self.busy_s / self.others_s
        return (
            f"{self.node} needs {self.busy_s:.3g} s for its own part of a step, {times:.2g} times the "
            f"{self.others_s:.3g} s of other nodes for the same work, in each of the last {STEPS} steps"
        )


def find(
    busy: Mapping[Rank, Sequence[float]], seat_nodes: Sequence[NodeId], layout: Layout, factor: float
) -> list[Slow]:
    """Nodes that are ``factor`` times slower than others in all of the last ``STEPS`` iterations, the slowest first.

    ``busy``: per rank, seconds of its last iterations, oldest first. Nothing is said of a node while one of its ranks,
    or those it is compared with, have fewer than ``STEPS``.
    """
    last = {rank: list(values)[-STEPS:] for rank, values in busy.items() if len(values) >= STEPS}
    usual = {rank: statistics.median(values) for rank, values in last.items()}
    peers = {rank: group for group in layout.dp_groups for rank in group}
    found: list[Slow] = []
    for node in dict.fromkeys(seat_nodes):
        ranks = [rank for rank, holder in enumerate(seat_nodes) if holder == node]
        if not all(rank in last for rank in ranks):
            continue
        elsewhere = [usual[rank] for rank in usual if seat_nodes[rank] != node]
        yardsticks: dict[Rank, float] = {}
        for rank in ranks:
            same = [usual[peer] for peer in peers.get(rank, ()) if peer in usual and seat_nodes[peer] != node]
            if same or elsewhere:
                yardsticks[rank] = statistics.median(same or elsewhere)
        if len(yardsticks) < len(ranks):
            continue
        slow_in_all = all(
            statistics.median(last[rank][step] / max(yardsticks[rank], 1e-9) for rank in ranks) > factor
            and statistics.median(last[rank][step] - yardsticks[rank] for rank in ranks) > NOISE_S
            for step in range(STEPS)
        )
        if slow_in_all:
            own = statistics.median(usual[rank] for rank in ranks)
            found.append(Slow(node=node, busy_s=own, others_s=max(statistics.median(yardsticks.values()), 1e-9)))
    return sorted(found, key=lambda slow: slow.others_s / slow.busy_s)


def factor_of(job: Job) -> float | None:
    """The factor from which on a slow node is to be replaced; None: it is only reported."""
    asked = float(job.config.job.policy.get(POLICY, 0.0))
    return asked if asked > 0 else None


def look(job: Job, now: float) -> None:
    """The job finished a step: is a node slow? Reported once, and again only after it was not for ``FORGET_S``.

    Where a factor was asked for, a spare takes the slowest node's seats between two steps, if a warm one is there, or
    as soon as one is; at most one such swap in ``COOL_DOWN_S``.
    """
    factor = factor_of(job)
    slow = find(job.vitals.pace.busy, job.members.seat_nodes, job.config.job.layout, factor or REPORT_FACTOR)
    seen = job.vitals.slow
    for node in [node for node, at in seen.items() if now - at > FORGET_S or node not in job.members.seat_nodes]:
        del seen[node]
    for one in slow:
        if one.node not in seen:
            figures: dict[str, Any] = {"busy_s": round(one.busy_s, 6), "others_s": round(one.others_s, 6)}
            job.log("warning", node=one.node, kind="slow_node", reason=one.reason + _note(job, factor), **figures)
        seen[one.node] = now
    last = job.vitals.slow_swap_at
    if factor is None or not slow or not _fast_spare(job) or (last is not None and now - last < COOL_DOWN_S):
        return
    node = slow[0].node
    try:
        planned.start(job, {"node": node, "to": _fast_spare(job)}, "", now, leaves=False)
    except UsageError:
        return  # something else is under way: the next step asks again
    job.vitals.slow_swap_at = now
    job.members.members[node].slow = True


def _fast_spare(job: Job) -> NodeId:
    """The first warm spare that is healthy and was not slow itself; empty if there is none."""
    members = job.members.members
    usable = (name for name in job.members.spares if members[name].ready)
    return next((name for name in usable if not members[name].unfit and not members[name].slow), "")


def _note(job: Job, factor: float | None) -> str:
    if factor is None:
        return ""
    return "" if _fast_spare(job) else "; it stays, because no healthy warm spare is there"
