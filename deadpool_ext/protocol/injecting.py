"""Faults for a job that runs: what a spec means at this moment, or why it cannot be taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from deadpool_ext.protocol.fault_kinds import Hand, Target
from deadpool_ext.protocol.faults import FaultSpec, parse_fault
from deadpool_ext.protocol.messages import AddFault, Strike
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.types import UsageError

#: Phases that an iteration goes through when its result is known already, or that a recovery to it does.
AFTER_THE_RESULT: Final = frozenset({"d2h", "h2h", "post_step", "eval", "save", "recovery"})
_NOT_BEGUN: Final = frozenset({State.FORMING, State.STARTING})


def inject(job: Job, text: str, now: float) -> tuple[str, list[Strike]]:
    """Take a fault for the running job. Returns what will happen, in one line, and what is to be struck at once.

    Raises UsageError, one line: unknown kinds and keys, no such node or rank, nothing there to hit, a step that is
    over, a job that is over.
    """
    if job.state in (State.FINISHING, State.STOPPED):
        raise UsageError(f"fault {text!r}: the job is over")
    fault = parse_fault(text, job.strikes.next_id, live=True)
    note = _check_place(job, text, fault)
    when = _check_time(job, text, fault)
    job.strikes.add(fault)
    strikes: list[Strike] = []
    if fault.step is not None:
        _tell_everybody(job, fault)
    elif job.state in _NOT_BEGUN:
        pass  # timers of faults start when training begins
    elif fault.after_s:
        job.timers.start(f"fault:{fault.id}", now + fault.after_s)
    else:
        strikes = job.strikes.timed_due(fault.id, job.seating())
    what = fault.kind
    if fault.rank is not None:
        what += f" on rank {fault.rank}"
    elif fault.node is not None or strikes:
        what += f" on {fault.node or strikes[0].node}"
    return f"{what} {when}{note}", strikes


def _tell_everybody(job: Job, fault: FaultSpec) -> None:
    """Those that are here, and with the job those that come later."""
    spec = job.config.job
    content = fault.to_dict()
    job.config = replace(job.config, job=replace(spec, faults=(*spec.faults, content)))
    job.send(job.members.in_order(), AddFault(fault=content))


def _check_place(job: Job, text: str, fault: FaultSpec) -> str:
    """Refuse what is not there; returns a remark for the answer."""
    members, target = job.members, fault.about.target
    world_size = job.config.job.layout.world_size
    if fault.rank is not None and fault.rank >= world_size:
        raise UsageError(f"fault {text!r}: no rank {fault.rank}; ranks: 0 to {world_size - 1}")
    node = fault.node
    if node is not None and node not in members.members:
        why = f": lost ({members.gone[node]})" if node in members.gone else ""
        raise UsageError(f"fault {text!r}: no node {node!r} in the job{why}; nodes: {' '.join(members.in_order())}")
    idle = node is not None and bool(members.seat_nodes) and node not in members.seat_nodes
    now = fault.step is None and not fault.after_s
    if target is Target.SPARE:
        if node is not None and members.seat_nodes and not idle:
            raise UsageError(f"fault {text!r}: {node} is no spare; spares: {' '.join(members.spares) or '(none)'}")
        if now and not members.spares:
            raise UsageError(f"fault {text!r}: no spare is waiting")
        return ""
    if not idle:
        return ""
    if fault.step is not None:
        return f", if {node} trains then: it is a spare"
    if now and (target is Target.RANK or fault.about.hand is Hand.WORKER):
        raise UsageError(f"fault {text!r}: {node} is a spare, which trains nothing")
    return ""


def _check_time(job: Job, text: str, fault: FaultSpec) -> str:
    """Refuse what is over; returns when it happens, in words."""
    if fault.step is None:
        if job.state in _NOT_BEGUN:
            return f"{fault.after_s:g} s after training has begun" if fault.after_s else "when training has begun"
        return f"in {fault.after_s:g} s" if fault.after_s else "now"
    last, done = job.config.train_iters, job.ledger.highest
    if last is not None and fault.step > last:
        raise UsageError(f"fault {text!r}: the job ends after step {last}")
    if fault.step < done or (fault.step == done and fault.phase not in AFTER_THE_RESULT):
        raise UsageError(f"fault {text!r}: step {fault.step} is over; step {done + 1} is being computed")
    when = f"in step {fault.step}, {fault.phase}"
    if job.state not in _NOT_BEGUN and fault.step in (done, done + 1):
        when += ", unless that is behind already: it is being computed"
    return when
