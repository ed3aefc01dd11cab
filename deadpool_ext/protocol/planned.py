"""A planned swap: a node gives its seats to a spare at a step boundary, and nothing is computed twice.

*Preparing*: the spare constructs alone while training goes on. *Pausing*: every rank is asked to stand still after
one and the same iteration; one that is past it already says so, and a later one is chosen. *Switching*: with all ranks
standing still and that version committed, a new generation is opened as after a failure, but nobody failed.

The node that gives its seats up keeps everything until all copies are complete again: a failure before that gives them
back, with what belongs to them, so that a planned swap never makes a job more vulnerable than it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deadpool_ext.protocol import failing
from deadpool_ext.protocol.effects import Disconnect, SendOperators
from deadpool_ext.protocol.messages import (
    Assign,
    Constructed,
    Fence,
    OperatorAnswer,
    OperatorRequest,
    Pause,
    PauseAck,
    Paused,
    Shutdown,
    SpecDeclared,
    StandDown,
    Strike,
    WorkerExited,
    WorkerSeated,
)
from deadpool_ext.protocol.moves import Move, Stage
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.types import NodeId, Rank, UsageError

_TIMERS = ("prepare", "pause")


# ---- beginning -----------------------------------------------------------------------------------------------------


def swap(job: Job, request: OperatorRequest, now: float) -> list[Strike]:
    """``deadpool swap``: the node becomes a spare."""
    start(job, request.arguments, request.request, now, leaves=False)
    return []


def drain(job: Job, request: OperatorRequest, now: float) -> list[Strike]:
    """``deadpool drain``: the node leaves the job. A spare just goes."""
    node = request.arguments.get("node", "")
    if node in job.members.spares and not (job.planned is not None and job.planned.spare == node):
        _leave(job, node, "drained: it was a spare")
        _answer(job, request.request, f"{node} was a spare and has left")
        return []
    start(job, request.arguments, request.request, now, leaves=True)
    return []


def start(job: Job, arguments: Mapping[str, str], request: str, now: float, *, leaves: bool) -> None:
    """Begin to move the seats of node ``arguments['node']`` to ``arguments['to']``, or to the first warm spare.

    Raises UsageError, one line, where that cannot be.
    """
    node, to = arguments.get("node", ""), arguments.get("to", "")
    _check_moment(job)
    spare = _choose(job, node, to)
    seats = job.members.seats_of(node)
    job.planned = Move(node=node, spare=spare, seats=seats, leaves=leaves, request=request, generation=job.generation)
    facts = tuple(job.facts.get(rank, {}) for rank in seats)
    job.send([spare], Assign(generation=job.generation, seats=seats, solo=True, facts=facts))
    job.timers.start("prepare", now + job.config.deadlines.construct_s)
    job.log("swap_begun", node=node, to=spare, seats=list(seats), leaves=leaves)
    _answer(job, request, f"{spare} prepares to take seats {_list(seats)} of {node}; training goes on", final=False)


def _check_moment(job: Job) -> None:
    if job.state in (State.FINISHING, State.STOPPED) or job.seats.finished:
        raise UsageError("training is over")
    if job.state in (State.FORMING, State.STARTING):
        raise UsageError("training has not begun: ask again when the first step is done")
    recovery = job.recovery
    if job.planned is not None:
        raise UsageError(f"{job.planned.spare} is about to replace {job.planned.node}: ask again when that is done")
    if job.state is not State.RUNNING or (recovery is not None and not (recovery.done and recovery.redundant)):
        raise UsageError("a recovery is under way: ask again when it is done")


def _choose(job: Job, node: NodeId, to: NodeId) -> NodeId:
    members = job.members
    spares = [spare for spare in members.spares if members.members[spare].ready]
    names = " ".join(spares) or "(none)"
    if node not in members.seat_nodes:
        what = "is a spare, and has no seats to give" if node in members.members else "is no node of this job"
        raise UsageError(f"{node or '(no node)'} {what}; nodes with seats: {' '.join(members.active)}")
    if to and to not in spares:
        raise UsageError(f"{to} is no warm spare; warm spares: {names}")
    fit = [spare for spare in spares if not members.members[spare].unfit]
    if not spares or (not to and not fit):
        raise UsageError(f"no healthy warm spare is there to take the seats of {node}; warm spares: {names}")
    return to or fit[0]


# ---- preparing -----------------------------------------------------------------------------------------------------


def on_newcomer(job: Job, node: NodeId, message: object, now: float) -> bool:
    """What the spare that prepares says of its seats. False: it is something else."""
    move = job.planned
    if move is None or node != move.spare or move.stage is Stage.SWITCHING:
        return False
    match message:
        case WorkerSeated() if message.rank in move.seats:
            move.seated[message.rank] = message
        case SpecDeclared() if message.spec.rank in move.seats:
            known = job.specs[message.spec.rank]
            if (message.spec.layout_digest, message.spec.shard_bytes) != (known.layout_digest, known.shard_bytes):
                cancel(job, f"{node} has another shard for seat {message.spec.rank}: its software or data differs", now)
        case Constructed() if message.rank in move.seats:
            where = {"solo_ops": message.solo_ops, "remote_ops": message.remote_ops}
            job.log("constructed", node=node, rank=message.rank, **where)
            move.constructed.add(message.rank)
            if move.stage is Stage.PREPARING and move.constructed.issuperset(move.seats):
                job.timers.cancel("prepare")
                _ask(job, move, now)
        case WorkerExited() if message.rank in move.seats:
            how = message.script_error or f"status {message.status}"
            cancel(job, f"the worker of seat {message.rank} on {node} ended while it prepared ({how})", now)
        case _:
            return False
    return True


def on_prepare_over(job: Job, subject: str, now: float) -> None:
    """The spare of a planned swap did not get through set-up in time: the swap is given up."""
    limit = job.config.deadlines.construct_s
    if job.planned is not None:
        cancel(job, f"{job.planned.spare} was not through set-up within {limit:g} s", now)


# ---- pausing -------------------------------------------------------------------------------------------------------


def _ask(job: Job, move: Move, now: float) -> None:
    """Choose an iteration that nobody has finished yet, as far as is known, and ask all to stand still after it."""
    move.stage = Stage.PAUSING
    job.timers.cancel("pause")
    move.newest = max(move.newest, job.ledger.highest, *job.committed.values(), 0)
    move.after = move.newest + move.margin
    move.margin *= 2
    move.promised, move.paused = set(), {}
    last = job.config.train_iters
    if last is not None and move.after >= last:
        cancel(job, f"training ends after iteration {last}, before all could stand still", now)
        return
    job.send(job.members.active, Pause(generation=job.generation, after=move.after))


def on_pause_ack(job: Job, node: NodeId, message: PauseAck, now: float) -> None:
    """A rank will stand still after the iteration that was asked for, or is past it: then a later one is chosen."""
    move = job.planned
    if move is None or move.stage is not Stage.PAUSING or message.after != move.after:
        return
    move.newest = max(move.newest, message.captured)
    if message.captured >= move.after:
        _ask(job, move, now)
    else:
        move.promised.add(message.rank)


def on_paused(job: Job, node: NodeId, message: Paused, now: float) -> None:
    """A rank stands still; with the last one, and all copies complete, the seats change hands."""
    move = job.planned
    if move is None or move.stage is not Stage.PAUSING or message.iteration != move.after:
        return
    if not move.paused:
        job.timers.start("pause", now + job.config.deadlines.boundary_s)
    move.paused.setdefault(message.rank, now)
    switch_if_ready(job, now)


def on_pause_over(job: Job, subject: str, now: float) -> None:
    """Not all ranks stood still in time for a planned swap: it is given up, and training goes on."""
    limit = job.config.deadlines.boundary_s
    cancel(job, f"not all ranks came to the step boundary within {limit:g} s after the first", now)


# ---- switching -----------------------------------------------------------------------------------------------------


def switch_if_ready(job: Job, now: float) -> None:
    """All stand still and the version is committed: open the new generation."""
    move = job.planned
    if (
        move is None
        or move.stage is not Stage.PAUSING
        or job.state is not State.RUNNING
        or len(move.paused) < job.config.job.layout.world_size
        or any(job.committed.get(node, -1) < move.after for node in job.members.active)
    ):
        return
    move.stage = Stage.SWITCHING
    for name in _TIMERS:
        job.timers.cancel(name)
    job.members.replace(move.node, move.spare)
    job.members.members[move.spare].assigned = True
    for rank in move.seats:
        move.before[rank] = (job.seated_in.get(rank, 0), job.seats.end.get(rank))
        job.seated_in[rank] = move.generation
        job.exited.discard(rank)
        job.seats.seated(move.spare, move.seated[rank])
        job.vitals.forget(rank)
    failing.begin_recovery(job, [], now)
    # It stands still with the others: out of the step, frozen, and ready to take part again.
    reason = f"seats {_list(move.seats)} go to {move.spare}"
    job.send([move.node], Fence(generation=job.generation, reason=reason))


def resumed(job: Job, now: float) -> None:
    """Every rank has its state and goes on."""
    move = job.planned
    if move is not None and move.stage is Stage.SWITCHING and move.resumed_at is None:
        move.resumed_at = now


def undo(job: Job, reason: str) -> None:
    """A failure in the middle of the switch: the node that gave its seats up has them again, if it still can."""
    move = job.planned
    if move is None or move.stage is not Stage.SWITCHING:
        return
    job.planned = None
    recovery = job.recovery
    kept = recovery is None or not recovery.redundant
    if move.node not in job.members.members or not kept:
        _answer(job, move.request, f"seats {_list(move.seats)} are on {move.spare}, but then {reason}", ok=False)
        _release(job, move)
        return
    if recovery is not None:
        recovery.planned = ""  # what follows is the failure's recovery
    job.members.give_back(move.spare, move.node)
    for rank, (generation, process) in move.before.items():
        job.seated_in[rank] = generation
        job.vitals.forget(rank)
        if process is not None:
            job.seats.end[rank] = process
    if move.spare in job.members.members:
        _stand_down(job, move.spare, f"the swap was given up: {reason}")
    text = f"the swap of {move.node} for {move.spare} was given up: {reason}; {move.node} has its seats again"
    job.log("warning", node=move.node, kind="swap_given_up", reason=text)
    _answer(job, move.request, text, ok=False)


def _release(job: Job, move: Move) -> None:
    """All copies are complete without it: the node that gave its seats up leaves, or waits as a spare."""
    if move.node not in job.members.members or move.node in job.members.seat_nodes:
        return
    if move.leaves:
        _leave(job, move.node, f"drained: seats {_list(move.seats)} are on {move.spare} now")
    elif job.members.members[move.node].assigned:
        _stand_down(job, move.node, f"seats {_list(move.seats)} are on {move.spare} now")


def is_released(job: Job, node: NodeId) -> bool:
    """Whether this node gave its seats up just now."""
    move = job.planned
    return move is not None and move.node == node and move.stage is Stage.SWITCHING


def settle(job: Job, seconds: float | None = None) -> None:
    """The swap is over when the first step after the switch is finished and all copies are complete again.

    ``seconds``: that step is finished now, so long after training came to stand still.
    """
    move, recovery = job.planned, job.recovery
    if move is None or move.stage is not Stage.SWITCHING or recovery is None:
        return
    move.seconds = seconds if seconds is not None else move.seconds
    if move.seconds is None or not recovery.redundant:
        return
    job.planned = None
    job.swaps += 1
    _release(job, move)
    text = (
        f"seats {_list(move.seats)} of {move.node} are on {move.spare}; training stood still for {move.paused_s:.2f} s"
    )
    fields = {
        "node": move.node,
        "to": move.spare,
        "paused_seconds": move.paused_s,
        "total_seconds": move.seconds,
        "after_iteration": move.after,
    }
    answer = OperatorAnswer(request=move.request, ok=True, final=True, text=text, fields=fields)
    if move.leaves or move.node not in job.members.members:
        _tell(job, answer, f"{move.node} has left")
    else:
        job.getting_warm[move.node] = answer


def on_warm(job: Job, node: NodeId) -> None:
    """A node is warm again after it gave its seats up: whoever asked for that can go on."""
    if (answer := job.getting_warm.pop(node, None)) is not None:
        _tell(job, answer, f"{node} is a spare now")


def _tell(job: Job, answer: OperatorAnswer, then: str) -> None:
    if answer.request:
        job.out.append(SendOperators(message=replace(answer, text=f"{answer.text}; {then}")))


def paused(job: Job) -> dict[str, float]:
    """For the record of a planned swap: how long nobody computed. No part of the phases' sum: it overlaps them."""
    return {"paused": job.planned.paused_s} if job.planned is not None else {}


def end(job: Job, reason: str, now: float) -> None:
    """Training is over, or the job is."""
    for node in list(job.getting_warm):
        _tell(job, job.getting_warm.pop(node), reason)
    move = job.planned
    if move is None or move.stage is not Stage.SWITCHING:
        cancel(job, reason, now)
        return
    job.planned = None
    ok = move.seconds is not None
    how = f"seats {_list(move.seats)} of {move.node} are on {move.spare}, and {reason}" if ok else reason
    _answer(job, move.request, how, ok=ok)


def cancel(job: Job, reason: str, now: float) -> None:
    """Give up a swap that has not switched yet; training goes on, or something else has begun. Idempotent."""
    move = job.planned
    if move is None or move.stage is Stage.SWITCHING:
        return
    job.planned = None
    for name in _TIMERS:
        job.timers.cancel(name)
    if move.stage is Stage.PAUSING:
        job.send(job.members.active, Pause(generation=move.generation, after=-1))
    if move.spare in job.members.members:
        _stand_down(job, move.spare, f"the swap was given up: {reason}")
    text = f"the swap of {move.node} for {move.spare} was given up: {reason}"
    job.log("warning", node=move.node, kind="swap_given_up", reason=text)
    _answer(job, move.request, text, ok=False)


def on_lost(job: Job, node: NodeId, reason: str, now: float) -> None:
    """The spare that prepared is gone, or a node that had given its seats up."""
    if (answer := job.getting_warm.pop(node, None)) is not None:
        _tell(job, answer, f"{node} was lost since ({reason})")
    if job.planned is not None and job.planned.spare == node:
        cancel(job, f"{node} was lost ({reason})", now)


def _stand_down(job: Job, node: NodeId, reason: str) -> None:
    """No seats any more: fresh warm workers, then NodeReady."""
    member = job.members.members[node]
    member.assigned = member.ready = False
    job.send([node], StandDown(generation=job.generation, reason=reason))


def _leave(job: Job, node: NodeId, reason: str) -> None:
    job.send([node], Shutdown(code=0, reason=reason))
    job.out.append(Disconnect(node=node))
    job.members.remove(node, reason)
    job.health.forget(node)
    job.log("spare_left", node=node, reason=reason, spares=len(job.members.spares))


def _answer(job: Job, request: str, text: str, *, ok: bool = True, final: bool = True, **fields: object) -> None:
    if request:
        told = OperatorAnswer(request=request, ok=ok, final=final, text=text, fields=dict(fields))
        job.out.append(SendOperators(message=told))


def _list(seats: tuple[Rank, ...]) -> str:
    return ", ".join(map(str, seats))
