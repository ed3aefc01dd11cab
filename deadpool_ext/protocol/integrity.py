"""Copies that turned out bad: what is concluded when a seat's own slot cannot be used."""

from __future__ import annotations

from deadpool_ext.protocol import ending, failing
from deadpool_ext.protocol.messages import SlotCorrupt
from deadpool_ext.protocol.plan import BadCopy
from deadpool_ext.protocol.records import Failure
from deadpool_ext.protocol.state import Job
from deadpool_ext.protocol.types import NodeId


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
