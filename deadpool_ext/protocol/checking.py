"""Asking nodes how they are, and acting on the answer."""

from __future__ import annotations

from deadpool_ext.protocol import failing
from deadpool_ext.protocol.messages import CheckHealth, HealthReport
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.types import NodeId

_PROTECTED = frozenset({State.RUNNING, State.FENCING, State.RECOVERING, State.RESUMING})


def ask_all(job: Job) -> None:
    """Ask every active node; :func:`on_report` goes on when the last one has answered."""
    active = [node for node in job.members.active if node in job.members.members]
    job.send(active, CheckHealth(number=job.health.ask(active)))


def ask_one(job: Job, node: NodeId) -> None:
    """Ask one node, beside whatever is under way."""
    job.send([node], CheckHealth(number=0))


def on_report(job: Job, node: NodeId, message: HealthReport, now: float) -> None:
    """A node says how it is, in any state: what is new is told, an unfit node is replaced if that is possible."""
    new, fatal = job.health.note(node, message.findings)
    for finding in new:
        job.log("warning", node=node, kind="health", check=finding.check, fatal=finding.fatal, reason=finding.detail)
    complete = job.health.answered(node, message.number)
    member = job.members.members[node]
    member.unfit = "; ".join(f"{finding.check}: {finding.detail}" for finding in fatal)
    seated = node in job.members.seat_nodes
    if fatal and seated and job.state in _PROTECTED:
        reason = f"health check failed: {member.unfit}"
        if any(not job.members.members[spare].unfit for spare in job.members.spares):
            failing.lose(job, [node], reason, now, evidence="health check", fruitless=True)
            return
        if new:
            job.log("warning", node=node, kind="health", reason=f"{reason}; no healthy spare, so it stays")
    if complete:
        failing.conclude_connection(job, now)
