"""What turned out bad: a seat's own slot that cannot be used, parameters that differ between replicas."""

from __future__ import annotations

from deadpool_ext.protocol import ending, failing
from deadpool_ext.protocol.messages import ReplicaMismatch, SlotCorrupt
from deadpool_ext.protocol.plan import BadCopy
from deadpool_ext.protocol.records import Failure
from deadpool_ext.protocol.state import Job
from deadpool_ext.protocol.types import NodeId

#: Value of the policy ``on_mismatch``: go back, and replace whoever deviates. Otherwise it is only said.
SWAP = "swap"
PARAMETERS_DIFFER = "parameters differ"


def _note(job: Job, node: NodeId, message: SlotCorrupt) -> str:
    """Never use it again, and say so; returns what happened in words."""
    job.bad_copies.add(BadCopy(node=node, rank=message.rank, version=message.version, own=True))
    where = {"version": message.version.v, "lineage": message.version.lineage}
    job.log("corruption_detected", node=node, rank=message.rank, reason=message.detail, **where)
    return f"the own slot of seat {message.rank} on {node} is corrupt: {message.detail}"


def on_slot_corrupt(job: Job, node: NodeId, message: SlotCorrupt, now: float) -> None:
    """A seat's own slot is no good: plan anew, with the replica or an older version.

    No sign that going on is futile: each such report uses up a copy, and there are only a few.
    """
    failure = Failure(
        kind="copy_failed",
        node=node,
        rank=message.rank,
        reason=_note(job, node, message),
        permanent=False,
        evidence="verification",
        detected_at=now,
        blameless=True,
    )
    failing.begin_recovery(job, [failure], now)


def on_slot_corrupt_starting(job: Job, node: NodeId, message: SlotCorrupt, now: float) -> None:
    """The same before any version was committed: there is nothing to go back to."""
    reason = f"{_note(job, node, message)}, before a version was committed"
    ending.stop(job, 3, reason, (message.rank,))


def on_mismatch(job: Job, node: NodeId, message: ReplicaMismatch, now: float) -> None:
    """Parameters differ within a data-parallel group: say so, or go back and replace the node that deviates."""
    nodes = tuple(dict.fromkeys(job.members.seat_nodes[rank] for rank in message.deviating))
    job.log(
        "corruption_detected",
        node=nodes[0] if len(nodes) == 1 else None,
        rank=message.deviating[0] if len(message.deviating) == 1 else None,
        kind="parameters",
        version=message.version.v,
        lineage=message.version.lineage,
        group=list(message.group),
        deviating=list(message.deviating),
        digests=list(message.digests),
        reason=message.reason,
    )
    if job.config.job.policy.get("on_mismatch") != SWAP:
        return
    for rank in message.spoilt:
        holders = {(job.members.seat_nodes[rank], True)}
        holders |= {(job.members.seat_nodes[peer], False) for peer in job.replica_map[rank]}
        job.bad_copies |= {BadCopy(node=holder, rank=rank, version=message.version, own=own) for holder, own in holders}
    what = f"parameters differ after iteration {message.version.v}: {message.reason}"
    if nodes and len(job.members.spares) >= len(nodes):
        failing.lose(job, nodes, what, now, evidence=PARAMETERS_DIFFER, fruitless=True)
        return
    if nodes:
        job.log("warning", reason=f"no spare is there to replace {', '.join(nodes)}: everybody restores from slots")
    failure = Failure(
        kind="parameters_differ",
        node=nodes[0] if nodes else None,
        reason=what,
        permanent=False,
        evidence=PARAMETERS_DIFFER,
        detected_at=now,
    )
    failing.begin_recovery(job, [failure], now)
