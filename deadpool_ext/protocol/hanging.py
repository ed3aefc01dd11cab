"""What is done about ranks that stand still: said, looked into, and in the end restarted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from deadpool_ext.protocol import failing
from deadpool_ext.protocol.classify import Conclusion, Hang
from deadpool_ext.protocol.hangs import Held, Seat, Standstill, find
from deadpool_ext.protocol.messages import Heartbeat, Inspect, Inspected
from deadpool_ext.protocol.records import Failure
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.types import NodeId, Rank
from deadpool_ext.protocol.vitals import KNOT, QUIET_PLACES, REPLICATION_LATE, Subject, Told

FRESH_HEARTBEATS: Final = 4  # a look is that many heartbeat periods old at most, or nothing is concluded from it
STATUS_PERIOD_S: Final = 1.0  # how often status.json says how ranks are
_FRAMES: Final = 3  # of a stack in a reason
_LISTED: Final = 4  # waiting ranks in a sentence


# ---- what agents say -----------------------------------------------------------------------------------------------


def on_heartbeat(job: Job, node: NodeId, message: Heartbeat, now: float) -> None:
    """A look at each of a node's workers. Whoever had been reported and goes on: that is said, once."""
    seats = job.members.seat_nodes
    for vital in message.vitals:
        if not 0 <= vital.rank < len(seats) or seats[vital.rank] != node:
            continue
        over = job.vitals.note(node, vital, now)
        if over is not None:
            told, stood = over
            _say_over(job, vital.rank, node, f"rank {vital.rank} on {node} goes", told.place, stood)


def on_inspected(job: Job, node: NodeId, message: Inspected) -> None:
    """Where a rank stands: for people, and for the failure that may follow."""
    rank, subject = job.vitals.asked.pop(message.number, (-1, -1))
    if rank != message.rank:
        return
    told = job.vitals.told.get(subject)
    if told is not None and subject == KNOT:
        told.stack = (*told.stack, f"rank {rank}: {message.stack[0] if message.stack else message.problem}")
    elif told is not None:
        told.stack, told.problem = message.stack, message.problem
    what = _frames(message.stack, message.problem)
    reason = f"rank {message.rank} on {node}: {what}"
    job.log("warning", node=node, rank=message.rank, kind="stack", reason=reason, stack=list(message.stack))


# ---- looking -------------------------------------------------------------------------------------------------------


def look(job: Job, now: float) -> None:
    """Who stands still? Report it once, and end it if others have waited for it long enough."""
    vitals = job.vitals
    _show(job, now)
    if job.state is not State.RUNNING or (job.planned is not None and job.planned.paused):
        vitals.pause()
        return
    vitals.enter(job.generation, now)
    if not vitals.looks or job.suspicion is not None:
        return  # who left a broken collective stands still until that is explained
    seats = _seats(job, now)
    found = find(seats, job.config.deadlines.slow_s)
    _forget_what_is_over(job, seats, found, now)
    for standstill in found:
        if standstill.still_s >= _report_after(job, seats, standstill):
            _report(job, seats, standstill, now)
    overdue = [one for one in found if one.held and one.still_s >= limit_s(job, seats, one)]
    if overdue:
        _end(job, seats, found, overdue, now)


def limit_s(job: Job, seats: Sequence[Seat], standstill: Standstill) -> float:
    """After how many seconds it is a hang; see docs/timeouts.md."""
    deadlines = job.config.deadlines
    seat = seats[standstill.rank] if standstill.rank is not None else None
    if seat is not None and seat.halted:
        return deadlines.hang_s  # no slowness explains it
    if standstill.replication:
        redundant = job.recovery is None or job.recovery.redundant
        # Copies are made anew after a recovery: that has a deadline of its own.
        return deadlines.hang_max_s if redundant else float("inf")
    if seat is not None and seat.place in QUIET_PLACES:
        return max(deadlines.hang_max_s, deadlines.stall_s) if seat.place == "save" else deadlines.hang_max_s
    usual = job.vitals.pace.longest_standstill
    if seat is not None and not job.vitals.looks[seat.rank].iterations and seat.iteration <= job.began_at + 1:
        usual = max(usual, deadlines.hang_s)  # its first iteration: compiling, warming up
    return min(deadlines.hang_max_s, max(deadlines.hang_s, deadlines.hang_factor * usual))


def blame(job: Job, what: str, now: float) -> bool:
    """A collective failed and no death explains it: does a rank that stands still? Then that is ended."""
    if job.state is not State.RUNNING:
        return False
    seats = _seats(job, now)
    found = find(seats, job.config.deadlines.slow_s)
    roots = [one for one in found if one.rank is not None and one.rank in job.vitals.told and one.sure]
    if roots:
        _end_roots(job, seats, roots, now, f"; {what}")
    return bool(roots)


def _seats(job: Job, now: float) -> list[Seat]:
    fresh = FRESH_HEARTBEATS * job.config.deadlines.heartbeat_s
    left = {rank for rank, done in job.seats.finished.items() if done.generation == job.generation} | job.exited
    return job.vitals.seats(job.members.seat_nodes, job.generation, left, now, fresh)


def _report_after(job: Job, seats: Sequence[Seat], standstill: Standstill) -> float:
    quiet = standstill.rank is not None and seats[standstill.rank].place in QUIET_PLACES
    return job.config.deadlines.hang_s if quiet else job.config.deadlines.slow_s


# ---- saying --------------------------------------------------------------------------------------------------------


def _report(job: Job, seats: Sequence[Seat], standstill: Standstill, now: float) -> None:
    subject = _subject(standstill)
    if subject in job.vitals.told:
        return
    seat = seats[standstill.rank] if standstill.rank is not None else None
    place = seat.place if seat is not None else ""
    job.vitals.told[subject] = Told(since=now - standstill.still_s, place=place)
    job.log(
        "warning",
        node=seat.node if seat is not None else None,
        rank=standstill.rank,
        kind="slow",
        what="rank" if seat is not None else subject,
        reason=_words(job, seats, standstill),
        place=place,
        iteration=seat.iteration if seat is not None else None,
        process=seat.process if seat is not None else "",
        seconds=round(standstill.still_s, 1),
        limit=_finite(limit_s(job, seats, standstill)),
        waiting=[
            {
                "rank": one.rank,
                "operation": one.operation,
                "group": one.group,
                "number": one.number,
                "others": list(one.others),
            }
            for one in standstill.held
        ],
    )
    ranks = [standstill.rank] if standstill.rank is not None else []
    if standstill.knot:
        ranks = list(dict.fromkeys(one.rank for one in standstill.held))[:_LISTED]
    for rank in ranks:
        vitals = job.vitals
        vitals.questions += 1
        vitals.asked[vitals.questions] = (rank, subject)
        job.send([seats[rank].node], Inspect(rank=rank, number=vitals.questions))


def _forget_what_is_over(job: Job, seats: Sequence[Seat], found: Iterable[Standstill], now: float) -> None:
    """Ranks say themselves that they go on; replication and knots are over when they are not seen any more."""
    still = {_subject(one) for one in found}
    for subject in (REPLICATION_LATE, KNOT):
        if subject in job.vitals.told and subject not in still and all(seat.known for seat in seats):
            told = job.vitals.told.pop(subject)
            what = "replication" if subject == REPLICATION_LATE else "the ranks that waited for each other"
            verb = "goes" if subject == REPLICATION_LATE else "go"
            _say_over(job, None, None, f"{what} {verb}", "", now - told.since)


def _say_over(job: Job, rank: Rank | None, node: NodeId | None, who: str, place: str, seconds: float) -> None:
    where = f" in {place}" if place else ""
    reason = f"{who} on again after {seconds:.1f} s{where}"
    job.log("warning", node=node, rank=rank, kind="slow_over", reason=reason, place=place, seconds=round(seconds, 1))


def _subject(standstill: Standstill) -> Subject:
    if standstill.rank is not None:
        return standstill.rank
    return REPLICATION_LATE if standstill.replication else KNOT


def _words(job: Job, seats: Sequence[Seat], standstill: Standstill) -> str:
    waiting = _waiting(standstill.held)
    if standstill.replication:
        late = late_nodes(job)
        whose = f" (not committed on {', '.join(late)})" if late else ""
        return f"copies are not complete after {standstill.still_s:.1f} s{whose}: {waiting}"
    if standstill.rank is None:
        return f"ranks wait for each other for {standstill.still_s:.1f} s{_mismatch(standstill.held)}: {waiting}"
    seat = seats[standstill.rank]
    stopped = f", its process is stopped (state {seat.process})" if seat.halted else ""
    waiting = waiting if standstill.sure else "it may wait for its device"
    return (
        f"rank {seat.rank} on {seat.node} stands still in {seat.place} of iteration {seat.iteration} "
        f"for {standstill.still_s:.1f} s{stopped}; {waiting}"
    )


def _waiting(held: Sequence[Held]) -> str:
    if not held:
        return "nobody waits for it"
    more = f" and {len(held) - _LISTED} more" if len(held) > _LISTED else ""
    return f"waiting: {', '.join(str(one) for one in held[:_LISTED])}{more}"


def _mismatch(held: Iterable[Held]) -> str:
    """Different operations under one number of one group, if there are any."""
    operations: dict[tuple[str, int], set[str]] = {}
    for one in held:
        if one.number:
            operations.setdefault((one.group, one.number), set()).add(one.operation)
    for (group, _), names in sorted(operations.items()):
        if len(names) > 1:
            return f", in different operations of {group} ({', '.join(sorted(names))})"
    return ""


def late_nodes(job: Job) -> list[NodeId]:
    """Active nodes that have not seen the version committed that others have; empty if they do not differ."""
    seen = {node: job.committed.get(node, -1) for node in job.members.active}
    newest = max(seen.values(), default=-1)
    return [node for node, version in seen.items() if version < newest]


def _frames(stack: Sequence[str], problem: str) -> str:
    if not stack:
        return f"no stack: {problem or 'it was empty'}"
    return f"stack, innermost first: {' < '.join(stack[:_FRAMES])}"


def _halted_node(job: Job, seats: Sequence[Seat], node: NodeId) -> bool:
    return all(seats[rank].halted for rank in job.members.seats_of(node))


def _finite(seconds: float) -> float | None:
    return round(seconds, 1) if seconds != float("inf") else None


# ---- ending it -----------------------------------------------------------------------------------------------------


def _end(job: Job, seats: Sequence[Seat], found: list[Standstill], overdue: list[Standstill], now: float) -> None:
    if any(one.rank is not None for one in overdue):
        # Others whose process is stopped could not leave the step anyway.
        roots = [one for one in found if one.rank is not None and (one in overdue or seats[one.rank].halted)]
        _end_roots(job, seats, roots, now, "")
        return
    first = overdue[0]
    kind = "hang" if first.replication else "collective_failed"
    told = job.vitals.told.get(_subject(first))
    stacks = f"; stacks: {'; '.join(told.stack)}" if told is not None and told.stack else ""
    reason = f"{_words(job, seats, first)}{stacks}"
    late = late_nodes(job) if first.replication else []
    failure = Failure(
        kind=kind,
        node=late[0] if len(late) == 1 else None,
        reason=reason,
        permanent=False,
        evidence=f"standstill of {first.still_s:.1f} s, limit {limit_s(job, seats, first):g} s; nobody is named",
        detected_at=now,
    )
    failing.begin_recovery(job, [failure], now)


def _end_roots(job: Job, seats: Sequence[Seat], roots: Iterable[Standstill], now: float, because: str) -> None:
    by_node: dict[NodeId, list[Standstill]] = {}
    for root in roots:
        assert root.rank is not None
        by_node.setdefault(seats[root.rank].node, []).append(root)
    free = len(job.members.spares)
    replaced: dict[NodeId, tuple[str, str]] = {}
    restarted: list[Failure] = []
    for node, ones in by_node.items():
        ranks = tuple(one.rank for one in ones if one.rank is not None)
        stopped = _halted_node(job, seats, node)
        if stopped:
            still = min(one.still_s for one in ones)
            reason = f"every process of {node} (ranks {list(ranks)}) is stopped for {still:.1f} s"
        else:
            reason = "; ".join(_reason(job, seats, one) for one in ones)
        hang = Hang(
            node=node,
            ranks=ranks,
            iterations=tuple(seats[rank].iteration for rank in ranks),
            generation=job.generation,
            stopped=stopped,
            reason=reason + because,
        )
        verdict = job.history.judge_hang(hang, now, job.limits, spare=len(replaced) < free)
        if verdict.conclusion is Conclusion.REPLACE:
            replaced[node] = (verdict.reason, verdict.evidence)
            continue
        for one in ones:
            evidence = f"{verdict.evidence}: {_evidence(job, seats, one)}"
            restarted.append(_failure(seats, one, _reason(job, seats, one) + because, evidence, now))
    if replaced:
        reason = "; ".join(reason for reason, _ in replaced.values())
        evidence = "; ".join(dict.fromkeys(evidence for _, evidence in replaced.values()))
        failing.lose(job, list(replaced), reason, now, evidence=f"hang: {evidence}", fruitless=True)
        for failure in restarted:
            if job.state is State.FENCING:
                failing.restart_worker(job, failure, now)
    else:
        failing.begin_recovery(job, restarted, now)


def _failure(seats: Sequence[Seat], root: Standstill, reason: str, evidence: str, now: float) -> Failure:
    assert root.rank is not None
    return Failure(
        kind="hang",
        node=seats[root.rank].node,
        rank=root.rank,
        reason=reason,
        permanent=False,
        evidence=evidence,
        detected_at=now,
    )


def _reason(job: Job, seats: Sequence[Seat], root: Standstill) -> str:
    told = job.vitals.told.get(_subject(root))
    stack = f"; {_frames(told.stack, told.problem)}" if told is not None else ""
    return f"{_words(job, seats, root)}{stack}"


def _evidence(job: Job, seats: Sequence[Seat], root: Standstill) -> str:
    assert root.rank is not None
    seat = seats[root.rank]
    return (
        f"no move for {root.still_s:.1f} s, limit {limit_s(job, seats, root):g} s, process state {seat.process}, "
        f"{len({one.rank for one in root.held})} ranks wait"
    )


# ---- status.json ---------------------------------------------------------------------------------------------------


def _show(job: Job, now: float) -> None:
    """How every rank is, for status.json, now and then."""
    vitals = job.vitals
    if not vitals.looks or now - vitals.shown_at < STATUS_PERIOD_S:
        return
    vitals.shown_at = now
    vitals.shown_ranks = [
        {
            "rank": seat.rank,
            "node": seat.node,
            "place": seat.place,
            "iteration": seat.iteration,
            "still_s": round(seat.still_s, 1),
            "waits": [f"{wait.operation} of {wait.group}" for wait in seat.waits],
        }
        for seat in _seats(job, now)
        if seat.place
    ]
    medians = {node: vitals.pace.median(job.members.seats_of(node)) for node in job.members.active}
    vitals.shown_nodes = {node: {"busy_s": round(value, 4)} for node, value in medians.items() if value is not None}
