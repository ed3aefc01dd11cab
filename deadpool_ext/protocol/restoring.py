"""From the fence to the first new step: plan, newcomers, rendezvous, restore, redundancy."""

from __future__ import annotations

from typing import Any

from deadpool_ext.protocol import ending, failing, planned
from deadpool_ext.protocol.effects import WriteStep
from deadpool_ext.protocol.messages import (
    Committed,
    Constructed,
    FenceAck,
    FenceDone,
    Fetched,
    HostStore,
    NodeReady,
    Rebuilt,
    Recover,
    Rendezvous,
    Restored,
    SpecDeclared,
    StepDone,
    StoreReady,
    TrainingFinished,
)
from deadpool_ext.protocol.plan import BadCopy, NodeInventory, make_plan
from deadpool_ext.protocol.recovery import Recovery
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.types import NodeId, NoPlan, Rank, WorkerState, invariant


def _recovery(job: Job) -> Recovery:
    invariant(job.recovery is not None, f"state {job.state} without a recovery")
    assert job.recovery is not None
    return job.recovery


# ---- fencing -------------------------------------------------------------------------------------------------------


def on_fence_done(job: Job, node: NodeId, message: FenceDone, now: float) -> None:
    """The node's workers are out of their collectives."""
    recovery = _recovery(job)
    if node in recovery.fencing and node not in recovery.aborted:
        recovery.aborted.add(node)
        if recovery.aborted == recovery.fencing:
            recovery.marks["aborted"] = now
            job.log("abort_done", seconds=round(now - recovery.fence_at, 6), nodes=len(recovery.aborted))


def on_fence_ack(job: Job, node: NodeId, message: FenceAck, now: float) -> None:
    """The node is unwound and frozen. A seat it names no worker for is forked again. After the last node: plan."""
    recovery = _recovery(job)
    if node not in recovery.fencing or node in recovery.acks:
        return
    on_fence_done(job, node, FenceDone(node=node, generation=message.generation), now)
    recovery.acks[node] = message
    job.timers.cancel(f"fence:{node}")
    alive = {state.rank for state in message.workers}
    dead = tuple(rank for rank in job.members.seats_of(node) if rank not in alive and rank not in recovery.new_workers)
    if dead:
        failing.refork(job, node, dead, now)
    if set(recovery.acks) == recovery.fencing:
        recovery.marks["unwound"] = now
        job.log("unwound", seconds=round(now - recovery.fence_at, 6), nodes=len(recovery.acks))
        plan_and_recover(job, now)


def plan_and_recover(job: Job, now: float) -> None:
    """Every survivor has reported: plan, and send the plan out."""
    recovery = _recovery(job)
    workers = _survivors(job, recovery)
    clean = [state.live.v for state in workers.values() if state.live is not None and not state.dirty]
    if clean and len(clean) == len(workers):
        recovery.completed = max(recovery.completed, min(clean))
    recovery.completed = max(recovery.completed, job.ledger.highest)
    plan = make_plan(
        generation=job.generation,
        layout=job.config.job.layout,
        seat_nodes=job.members.seat_nodes,
        replica_map=job.replica_map,
        inventories={node: NodeInventory(own=ack.own, hosted=ack.hosted) for node, ack in recovery.acks.items()},
        workers=workers,
        new_workers=recovery.new_workers,
        bad_copies=job.bad_copies,
        digests={rank: spec.layout_digest for rank, spec in job.specs.items()},
    )
    if isinstance(plan, NoPlan):
        job.log("plan", reason=plan.reason, possible=False, seats=list(plan.seats))
        ending.stop(job, 3, plan.reason, plan.seats)
        return
    recovery.plan = plan
    recovery.marks["planned"] = now
    job.state = State.RECOVERING
    job.log(
        "plan",
        possible=True,
        version=plan.target.v,
        lineage=plan.target.lineage,
        steps_replayed=recovery.steps_replayed,
        sources=recovery.sources,
        new_workers=sorted(recovery.new_workers),
        reason=plan.reason,
    )
    job.send(
        [node for node in job.members.active if job.members.members[node].assigned],
        Recover(plan=plan, replicate=job.replicate()),
    )
    host = store_host(job)
    job.send([job.members.seat_nodes[host]], HostStore(generation=job.generation, rank=host))
    job.timers.cancel_kind("fence")
    job.timers.start("store", now + job.config.deadlines.store_s)
    if recovery.replica_seats:
        job.timers.start("fetch", now + job.config.deadlines.fetch_s)


def _survivors(job: Job, recovery: Recovery) -> dict[Rank, WorkerState]:
    return {
        state.rank: state
        for node, ack in recovery.acks.items()
        for state in ack.workers
        if state.rank not in recovery.new_workers and job.members.seat_nodes[state.rank] == node
    }


def store_host(job: Job) -> Rank:
    """The seat that opens the store: the lowest kept one, else the lowest on a node that was told its seats."""
    recovery = _recovery(job)
    seats = [rank for rank, node in enumerate(job.members.seat_nodes) if job.members.members[node].assigned]
    kept = [rank for rank in seats if rank not in recovery.new_workers]
    return (kept or seats)[0]


def on_ready_active(job: Job, node: NodeId, message: NodeReady, now: float) -> None:
    """A spare that was chosen before it was warm can take its seats now."""
    member = job.members.members[node]
    if member.ready:
        return
    recovery = _recovery(job)
    member.ready = True
    job.timers.cancel(f"warm:{node}")
    job.assign(node, job.members.seats_of(node), now, solo=True)
    if recovery.plan is not None:
        job.send([node], Recover(plan=recovery.plan, replicate=job.replicate()))


# ---- recovering ----------------------------------------------------------------------------------------------------


def on_spec(job: Job, node: NodeId, message: SpecDeclared, now: float) -> None:
    """A newcomer at ``train()`` entry must have exactly the shard that the seat had."""
    known = job.specs[message.spec.rank]
    # How much room the metadata gets is the first holder's word; a newcomer has not loaded what it holds yet.
    if (message.spec.layout_digest, message.spec.shard_bytes) != (known.layout_digest, known.shard_bytes):
        ending.stop(
            job,
            3,
            f"the new worker of seat {message.spec.rank} on {node} has another shard than the seat "
            f"({message.spec.layout_digest}, {message.spec.shard_bytes} bytes, instead of {known.layout_digest}, "
            f"{known.shard_bytes} bytes): the node's software or data differs",
            (message.spec.rank,),
        )


def on_constructed(job: Job, node: NodeId, message: Constructed, now: float) -> None:
    """A newcomer is through set-up."""
    recovery = _recovery(job)
    if message.rank not in recovery.new_workers:
        return
    # Survivors took no part in it: counted where a real communicator would have been called.
    job.log("constructed", node=node, rank=message.rank, solo_ops=message.solo_ops, remote_ops=message.remote_ops)
    recovery.constructed.add(message.rank)
    if recovery.constructed.issuperset(set(job.members.seats_of(node)) & recovery.new_workers):
        job.timers.cancel(f"construct:{node}")
    if recovery.constructed.issuperset(recovery.new_workers):
        recovery.marks["constructed"] = now
    rendezvous_if_ready(job, now)


def on_fetched(job: Job, node: NodeId, message: Fetched, now: float) -> None:
    """A replica is verified and sealed where it is needed."""
    recovery = _recovery(job)
    if message.rank in recovery.fetched:
        return
    recovery.fetched.add(message.rank)
    if recovery.plan is not None:  # whatever was wrong with the own slot: it is written anew
        job.bad_copies.discard(BadCopy(node=node, rank=message.rank, version=recovery.plan.target, own=True))
    recovery.fetched_bytes += message.nbytes
    if recovery.fetched.issuperset(recovery.replica_seats):
        recovery.marks["fetched"] = now
        job.timers.cancel("fetch")
    rendezvous_if_ready(job, now)


def on_store(job: Job, node: NodeId, message: StoreReady, now: float) -> None:
    """The generation's store is open."""
    recovery = _recovery(job)
    if recovery.store is None:
        recovery.store = message
        recovery.marks["store"] = now
        job.timers.cancel("store")
        rendezvous_if_ready(job, now)


def rendezvous_if_ready(job: Job, now: float) -> None:
    """Connect the groups once the store is open, newcomers are constructed and replicas are in place."""
    recovery = _recovery(job)
    if (
        job.state is State.RECOVERING
        and recovery.store is not None
        and recovery.constructed.issuperset(recovery.new_workers)
        and recovery.fetched.issuperset(recovery.replica_seats)
    ):
        job.state = State.RESUMING
        recovery.marks["rendezvous"] = now
        job.timers.start("rebuild", now + job.config.deadlines.rebuild_s)
        store = recovery.store
        job.send(job.members.active, Rendezvous(generation=job.generation, host=store.host, port=store.port))


# ---- resuming ------------------------------------------------------------------------------------------------------


def on_rebuilt(job: Job, node: NodeId, message: Rebuilt, now: float) -> None:
    """A worker's groups are connected."""
    recovery = _recovery(job)
    recovery.rebuilt.add(message.rank)
    if len(recovery.rebuilt) == job.config.job.layout.world_size and "rebuilt" not in recovery.marks:
        recovery.marks["rebuilt"] = now
        job.timers.cancel("rebuild")
        job.timers.start("restore", now + job.config.deadlines.restore_s)
        job.log("rebuild_done", seconds=round(now - recovery.marks["rendezvous"], 6), groups=message.groups)


def on_restored(job: Job, node: NodeId, message: Restored, now: float) -> None:
    """A worker's state is in place; after the last one the job runs again."""
    recovery = _recovery(job)
    if message.rank in recovery.restored:
        return
    recovery.restored.add(message.rank)
    recovery.restored_bytes += message.nbytes
    recovery.digests[message.rank] = message.params_digest
    if len(recovery.restored) < job.config.job.layout.world_size:
        return
    on_all_restored(job, now)


def on_all_restored(job: Job, now: float) -> None:
    """Compare parameters over the data-parallel groups, then run (INV-1)."""
    recovery = _recovery(job)
    assert recovery.plan is not None
    for group in job.config.job.layout.dp_groups:
        if len({recovery.digests[rank] for rank in group} - {""}) > 1:
            digests = {rank: recovery.digests[rank] for rank in group}
            job.log("corruption_detected", reason="parameters differ after the restore", digests=digests)
            ending.stop(
                job, 3, f"parameters of data-parallel group {list(group)} differ after the restore: {digests}", group
            )
            return
    recovery.marks.setdefault("rebuilt", now)
    recovery.marks["restored"] = now
    job.state = State.RUNNING
    job.began_at = recovery.plan.target.v
    job.timers.cancel("rebuild")
    job.timers.cancel("restore")
    job.timers.start("stall", now + job.config.deadlines.stall_s)
    if not recovery.redundant:
        job.timers.start("redundancy", now + job.config.deadlines.redundancy_s)
    target = recovery.plan.target
    seconds = round(now - recovery.marks["rebuilt"], 6)
    job.log("restore_done", version=target.v, lineage=target.lineage, bytes=recovery.restored_bytes, seconds=seconds)
    job.log("resume", version=target.v, lineage=target.lineage, steps_replayed=recovery.steps_replayed)
    planned.resumed(job, now)
    # Messages of different nodes overtake each other: the first new step may have been reported already.
    settle(job, now)


# ---- running -------------------------------------------------------------------------------------------------------


def on_step(job: Job, message: StepDone, now: float) -> None:
    """A finished iteration: record it once, whichever generation it is from; it is a fact, not an instruction."""
    line = job.ledger.add(message.record, message.generation)
    if line is None:
        return
    job.vitals.pace.note_step()
    job.out.append(WriteStep(record=line))
    shown = ("iteration", "lm_loss", "grad_norm", "step_seconds", "exposed_stall_seconds")
    job.log("step", rank=message.rank, of=line["generation"], **{key: line[key] for key in shown if key in line})
    if job.timers.running("stall"):
        job.timers.start("stall", now + job.config.deadlines.stall_s)
    settle(job, now)


def on_finished(job: Job, node: NodeId, message: TrainingFinished, now: float) -> None:
    """A worker is at the end of the script; after the last one, all may go."""
    ending.on_training_finished(job, node, message, now)
    settle(job, now)


def settle(job: Job, now: float) -> None:
    """End the recovery at the first step that is new, and training when every rank has finished."""
    if job.state is not State.RUNNING:
        return
    finished = ending.all_finished(job)
    recovery = job.recovery
    if recovery is not None and not recovery.done and (finished or job.ledger.highest > recovery.completed):
        recovery.done = True
        job.fruitless = 0
        job.recoveries += bool(recovery.failures)
        job.replayed_steps += recovery.steps_replayed
        assert recovery.plan is not None
        kind: dict[str, Any] = {"planned": recovery.planned} if recovery.planned else {}
        job.log(
            "recovery_done",
            version=recovery.plan.target.v,
            lineage=recovery.plan.target.lineage,
            steps_replayed=recovery.steps_replayed,
            bytes=recovery.fetched_bytes,
            restored_bytes=recovery.restored_bytes,
            sources=recovery.sources,
            **kind,
            failures=[failure.reason for failure in recovery.failures],
            new_workers=sorted(recovery.new_workers),
            seconds=recovery.seconds(now) | (planned.paused(job) if recovery.planned else {}),
            within_rebuild=recovery.within_rebuild(),
        )
        planned.settle(job, round(now - recovery.failed_at, 6))
    if finished:
        ending.finish(job, now)


def on_committed(job: Job, node: NodeId, message: Committed, now: float) -> None:
    """A node saw a version committed: after a recovery, its target's commit means that copies are complete again."""
    if job.timers.running("stall"):
        job.timers.start("stall", now + job.config.deadlines.stall_s)
    job.committed[node] = message.version.v
    planned.switch_if_ready(job, now)
    recovery = job.recovery
    if recovery is None or recovery.redundant or recovery.plan is None:
        return
    if message.version != recovery.plan.target and message.version.lineage != job.generation:
        return
    recovery.committed.add(node)
    if recovery.committed.issuperset(job.members.active):
        recovery.redundant = True
        job.degraded = False
        job.bad_copies.clear()  # a bad copy was a slot of its host's; the version committed since is in another one
        job.timers.cancel("redundancy")
        since = round(now - recovery.failed_at, 6)
        target = recovery.plan.target
        job.log("redundancy_restored", version=target.v, lineage=target.lineage, seconds=since)
        planned.settle(job)


# ---- deadlines -----------------------------------------------------------------------------------------------------


def on_store_over(job: Job, subject: str, now: float) -> None:
    """The seat chosen for it did not open a store: its node is given up."""
    node = job.members.seat_nodes[store_host(job)]
    limit = job.config.deadlines.store_s
    failing.lose(job, [node], f"no store opened within {limit:g} s", now, evidence="store_s", fruitless=True)


def on_fetch_over(job: Job, subject: str, now: float) -> None:
    """Replicas did not arrive in time."""
    recovery = _recovery(job)
    late = sorted(recovery.replica_seats - recovery.fetched)
    failing.on_deadline(job, f"seats {late} did not get their replicas in {job.config.deadlines.fetch_s:g} s", now)


def on_rebuild_over(job: Job, subject: str, now: float) -> None:
    """Groups did not connect in time."""
    late = [rank for rank in range(job.config.job.layout.world_size) if rank not in _recovery(job).rebuilt]
    failing.on_deadline(job, f"groups of seats {late} not connected in {job.config.deadlines.rebuild_s:g} s", now)


def on_restore_over(job: Job, subject: str, now: float) -> None:
    """State was not restored in time."""
    late = [rank for rank in range(job.config.job.layout.world_size) if rank not in _recovery(job).restored]
    failing.on_deadline(job, f"seats {late} not restored in {job.config.deadlines.restore_s:g} s", now)


def on_redundancy_over(job: Job, subject: str, now: float) -> None:
    """Copies were not completed in time, so the gate holds every rank."""
    recovery = _recovery(job)
    late = [node for node in job.members.active if node not in recovery.committed]
    limit = job.config.deadlines.redundancy_s
    failing.on_deadline(job, f"copies not complete again on {', '.join(late)} in {limit:g} s", now)


def on_stall_over(job: Job, subject: str, now: float) -> None:
    """Nothing finished and nothing was committed for a long time."""
    failing.on_deadline(job, f"no step and no commit within {job.config.deadlines.stall_s:g} s", now)
