"""From a failure to the fence: what is lost, who takes over, and the new generation."""

from __future__ import annotations

from collections.abc import Sequence

from deadpool_ext.protocol import checking as health
from deadpool_ext.protocol import ending, forming, hanging, planned
from deadpool_ext.protocol.classify import Conclusion, Death
from deadpool_ext.protocol.effects import Disconnect
from deadpool_ext.protocol.messages import CollectiveFailed, Fence, FetchFailed, Shutdown, WorkerExited
from deadpool_ext.protocol.plan import BadCopy
from deadpool_ext.protocol.records import Failure
from deadpool_ext.protocol.recovery import Recovery
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.types import NodeId, Rank


def lose(job: Job, nodes: Sequence[NodeId], reason: str, now: float, *, evidence: str, fruitless: bool = False) -> None:
    """Nodes are gone, or are given up: remove them, then do what the state asks for.

    ``evidence``: ``connection`` (it ended), ``left`` (its own word), ``silence`` (no heartbeat), or the name of a
    deadline or limit.
    ``fruitless``: the loss is our decision after failures that may well return.
    """
    lost: dict[NodeId, tuple[Rank, ...]] = {}
    failures: list[Failure] = []
    for node in nodes:
        if evidence not in ("connection", "left"):
            job.send([node], Shutdown(code=3, reason=f"given up: {reason}"))
            job.out.append(Disconnect(node=node))
        seats = job.members.remove(node, reason)
        job.health.forget(node)
        for kind in ("construct", "warm", "fence"):
            job.timers.cancel(f"{kind}:{node}")
        if not seats:
            job.log("spare_left", node=node, reason=reason, spares=len(job.members.spares))
            planned.on_lost(job, node, reason, now)
            continue
        lost[node] = seats
        failures.append(
            Failure(
                kind="node_lost",
                node=node,
                reason=f"lost node {node}: {reason}",
                permanent=True,
                evidence=evidence,
                detected_at=now,
                blameless=not fruitless,
            )
        )
    if job.state is State.FORMING:
        forming.on_lost_forming(job, list(nodes), reason, now)
    elif not lost:
        return
    elif job.state is State.STARTING:
        for failure in failures:
            job.note_failure(failure)
        names, seats = ", ".join(lost), tuple(rank for held in lost.values() for rank in held)
        ending.stop(job, 3, f"lost node {names} during set-up, before a version was committed ({reason})", seats)
    elif job.state is State.FINISHING:
        ending.on_lost_at_end(job, lost, failures, now)
    else:
        begin_recovery(job, failures, now)


def begin_recovery(job: Job, failures: list[Failure], now: float) -> None:
    """Open a new generation: fill the seats of lost nodes, fence survivors, fork dead workers again.

    Used in every state between the commit of the initial version and Finish; a recovery under way starts over.
    Without failures it is the switch of a planned swap.
    """
    if failures:
        reasons = "; ".join(failure.reason for failure in failures)
        planned.cancel(job, reasons, now)
        planned.undo(job, reasons)
    job.generation += 1
    for failure in failures:
        job.note_failure(failure)
    recovery = _measure(job, failures, now)
    limits = {
        node: max(now + job.config.deadlines.fence_s, job.timers.at(f"construct:{node}") or now)
        for node in job.members.members
    }
    job.timers.keep_only(("fault", "group"))
    job.suspicion, job.script_error = None, ""
    job.committed.clear()
    if failures and not any(failure.blameless for failure in failures):
        job.fruitless += 1
        if job.fruitless > job.config.fruitless_limit:
            ending.stop(
                job, 4, f"{job.fruitless} restarts in a row without a new step; the last one: {failures[0].reason}"
            )
            return
    lost = [node for node in job.members.active if node not in job.members.members]
    for node in lost:
        job.log("node_lost", node=node, seats=list(job.members.seats_of(node)), reason=job.members.gone.get(node, ""))
    spares = job.members.spares
    if len(spares) < len(lost):
        bare = tuple(rank for node in lost[len(spares) :] for rank in job.members.seats_of(node))
        ending.stop(
            job,
            3,
            f"no spare node is left for seats {list(bare)} of {', '.join(lost[len(spares) :])} "
            f"(lost: {', '.join(lost)}; spares: {len(spares)})",
            bare,
        )
        return
    survivors = [node for node in job.members.active if node not in lost]
    recovery.fencing = {node for node in survivors if job.members.members[node].assigned}
    if not recovery.fencing:
        seats = tuple(range(job.config.job.layout.world_size))
        ending.stop(job, 3, "no node that holds any state is left", seats)
        return
    job.state = State.FENCING
    reason = "; ".join(failure.reason for failure in failures) or f"{recovery.planned}, planned"
    job.log("fence", reason=reason, lost_nodes=lost, survivors=survivors)
    job.send(
        [node for node in survivors if node in recovery.fencing],
        Fence(generation=job.generation, reason=reason, lost_nodes=tuple(lost)),
    )
    for node, spare in zip(lost, spares, strict=False):
        seats = job.members.seats_of(node)
        job.members.replace(node, spare)
        recovery.new_workers.update(seats)
        job.assign(spare, seats, now, solo=True)
    for node in survivors:
        if node not in recovery.fencing:  # chosen in an older generation and not warm yet
            recovery.new_workers.update(job.members.seats_of(node))
            job.assign(node, job.members.seats_of(node), now, solo=True)
    dead = {failure.rank for failure in failures if failure.restarts_worker}
    for node in recovery.fencing:
        again = tuple(rank for rank in job.members.seats_of(node) if rank in dead or rank in job.exited)
        if again:
            refork(job, node, again, now)
    for node in recovery.fencing:
        # A newcomer unwinds when it is through set-up: it keeps the time that it had for that.
        job.timers.start(f"fence:{node}", limits[node])
    job.log("generation_start", seats={node: list(job.members.seats_of(node)) for node in job.members.active})
    if not job.degraded:
        job.degraded = True
        job.log("degraded", reason=reason, seats=sorted(recovery.new_workers))


def _measure(job: Job, failures: list[Failure], now: float) -> Recovery:
    if not failures:
        return _measure_planned(job, now)
    detected = min(failure.detected_at for failure in failures)
    if job.recovery is not None and not job.recovery.done:
        recovery = job.recovery
        recovery.restart(job.generation, now)
    else:
        struck = [job.strikes.claim(failure.node, failure.rank) for failure in failures]
        recovery = job.recovery = Recovery(
            generation=job.generation,
            failed_at=min([detected, *(at for at in struck if at is not None)]),
            detected_at=detected,
            first_fence_at=now,
            fence_at=now,
        )
    recovery.failures.extend(failures)
    return recovery


def _measure_planned(job: Job, now: float) -> Recovery:
    """Nobody failed: training stands still since the first rank does, and the newcomers are constructed already."""
    move = job.planned
    assert move is not None
    since = min(move.paused.values())
    recovery = job.recovery = Recovery(
        generation=job.generation,
        failed_at=since,
        detected_at=since,
        first_fence_at=now,
        fence_at=now,
        planned=f"{move.spare} takes seats {list(move.seats)} of {move.node}",
    )
    recovery.new_workers.update(move.seats)
    recovery.constructed.update(move.seats)
    recovery.marks["constructed"] = now
    return recovery


def refork(job: Job, node: NodeId, ranks: tuple[Rank, ...], now: float) -> None:
    """Have a healthy node fork these seats' workers again."""
    recovery = job.recovery
    assert recovery is not None
    recovery.new_workers.update(ranks)
    recovery.constructed.difference_update(ranks)
    job.assign(node, ranks, now, solo=True)


def on_exit(job: Job, node: NodeId, message: WorkerExited, now: float) -> None:
    """A worker ended between the initial version and Finish; see :mod:`~deadpool_ext.protocol.classify`.

    An exit with status 0 while running is the script's own end.
    """
    if job.state is State.RUNNING and message.status == 0 and not message.script_error:
        ending.note_clean_exit(job, message.rank, now)
        return
    death = Death(
        rank=message.rank,
        node=node,
        generation=job.generation,
        status=message.status,
        error=message.script_error,
        cause=message.cause,
        iteration=message.iteration,
    )
    spare = bool(job.members.spares)
    verdict = job.history.judge(death, now, job.limits, spare=spare, fencing=job.state is State.FENCING)
    if verdict.conclusion is Conclusion.STOP:
        job.log("failure_detected", node=node, rank=message.rank, kind="script_error", reason=verdict.reason)
        fields = {"class": "script", "reason": verdict.reason, "evidence": verdict.evidence}
        job.log("failure_classified", node=node, rank=message.rank, kind="script_error", **fields)
        ending.stop(job, 1, verdict.reason)
        return
    if verdict.conclusion is Conclusion.REPLACE:
        lose(job, [node], verdict.reason, now, evidence=verdict.evidence, fruitless=True)
        return
    if not message.script_error or message.cause == "device":
        health.ask_one(job, node)  # beside the recovery: only an unfit node changes its course
    restart_worker(
        job,
        Failure(
            kind="worker_exited",
            node=node,
            rank=message.rank,
            reason=verdict.reason,
            permanent=False,
            evidence=verdict.evidence,
            detected_at=now,
        ),
        now,
    )


def restart_worker(job: Job, failure: Failure, now: float) -> None:
    """Fork the worker of ``failure.rank`` again on its own node; a process that still lives there is killed."""
    assert failure.rank is not None and failure.node is not None
    if job.state is State.FENCING:
        # Nothing is planned yet: the seat joins those that are forked again, and this generation goes on.
        job.note_failure(failure)
        assert job.recovery is not None
        job.recovery.failures.append(failure)
        refork(job, failure.node, (failure.rank,), now)
    else:
        begin_recovery(job, [failure], now)


def on_collective_failed(job: Job, node: NodeId, message: CollectiveFailed, now: float) -> None:
    """A worker left a collective: usually the echo of a death, which gets its time to become known.

    Meanwhile every node is asked how it is: with both ends healthy it was the connection.
    """
    if job.suspicion is None:
        job.suspicion = (now, f"seat {message.rank} on {node} left a collective: {message.detail}")
        health.ask_all(job)
    if not job.timers.running("grace"):
        job.timers.start("grace", now + job.config.deadlines.collective_grace_s)


def on_grace_over(job: Job, subject: str, now: float) -> None:
    """Nothing died in the meantime. A node that has not answered is waited for: it answers, or its silence counts."""
    if not job.health.awaited:
        conclude_connection(job, now)


def conclude_connection(job: Job, now: float) -> None:
    """All nodes are well, and no death explains the broken collective: it was the connection."""
    if job.suspicion is None or job.timers.running("grace") or job.state not in (State.RUNNING, State.RESUMING):
        return
    since, what = job.suspicion
    if hanging.blame(job, what, now):
        return
    unhurt = f"all {len(job.members.active)} nodes are well and no process ended"
    begin_recovery(
        job,
        [
            Failure(
                kind="collective_failed",
                reason=what,
                permanent=False,
                evidence=f"{unhurt} within {now - since:.1f} s",
                detected_at=since,
            )
        ],
        now,
    )


def on_fetch_failed(job: Job, node: NodeId, message: FetchFailed, now: float) -> None:
    """A copy is no good: never use it again, and plan anew."""
    recovery = job.recovery
    assert recovery is not None and recovery.plan is not None
    bad = BadCopy(node=message.source_node, rank=message.rank, version=recovery.plan.target)
    job.bad_copies.add(bad)
    job.log(
        "corruption_detected" if message.corrupt else "warning",
        node=message.source_node,
        rank=message.rank,
        version=bad.version.v,
        lineage=bad.version.lineage,
        reason=message.detail,
    )
    begin_recovery(
        job,
        [
            Failure(
                kind="copy_failed",
                node=message.source_node,
                rank=message.rank,
                reason=f"the replica of seat {message.rank} on {message.source_node} was refused: {message.detail}",
                permanent=False,
                evidence="verification",
                detected_at=now,
                blameless=message.corrupt,  # uses up a copy, of which there are only a few
            )
        ],
        now,
    )


def on_deadline(job: Job, what: str, now: float) -> None:
    """Something shared did not end in time: another generation, bounded. A rank that stands still is the reason, if
    there is one; else nobody in particular is to blame."""
    if hanging.blame(job, what, now):
        return
    begin_recovery(
        job,
        [Failure(kind="deadline", reason=what, permanent=False, evidence="deadline", detected_at=now)],
        now,
    )


def on_fence_over(job: Job, node: NodeId, now: float) -> None:
    """A node that did not acknowledge the fence is given up."""
    limit = job.config.deadlines.fence_s
    lose(job, [node], f"no acknowledgement of the fence within {limit:g} s", now, evidence="fence_s", fruitless=True)


def on_construct_over(job: Job, node: str, now: float) -> None:
    """A newcomer did not get through set-up in time."""
    limit = job.config.deadlines.construct_s
    lose(job, [node], f"set-up not done within {limit:g} s", now, evidence="construct_s", fruitless=True)


def on_warm_over(job: Job, node: str, now: float) -> None:
    """A spare that was needed did not get warm in time."""
    limit = job.config.deadlines.spare_wait_s
    lose(job, [node], f"not warm within {limit:g} s", now, evidence="spare_wait_s", fruitless=True)
