"""The end of a job: training finished, the script's end, and every way to stop."""

from __future__ import annotations

from deadpool_ext.protocol import planned
from deadpool_ext.protocol.effects import Exit, SendOperators, WriteFinal, WriteStatus
from deadpool_ext.protocol.messages import Finish, JobEnded, Shutdown, TrainingFinished, WorkerExited
from deadpool_ext.protocol.records import Failure
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.types import NodeId, Rank


def stop(job: Job, code: int, reason: str, seats: tuple[Rank, ...] = ()) -> None:
    """End the job with an exit code of the contract (0, 1, 3 or 4); idempotent."""
    if job.state is State.STOPPED:
        return
    if code in (3, 4):
        if job.config.checkpoint:
            reason = f"{reason}; last durable checkpoint: {job.config.checkpoint}"
        job.log("unrecoverable", reason=reason, seats=list(seats), code=code)
    planned.end(job, f"the job stops: {reason}", 0.0)
    job.reason = reason
    job.state = State.STOPPED
    job.timers.keep_only(())
    iterations = max(job.ledger.highest, 0)
    missed = [fault.text for fault in job.strikes.missed]
    if missed:
        job.log("warning", kind="faults_missed", faults=missed, reason=f"never happened: {', '.join(missed)}")
    job.log("job_end", code=code, reason=reason, iterations=iterations, generations=job.generation + 1)
    job.out.append(
        WriteFinal(
            content={
                "job_id": job.config.job.job_id,
                "code": code,
                "reason": reason,
                "iterations": iterations,
                "generations": job.generation + 1,
                "failures": job.failures,
                "recoveries": job.recoveries,
                "swaps": job.swaps,
                "replayed_steps": job.replayed_steps,
                "faults_missed": missed,
                "seats": job.seats.to_list(job.members.seat_nodes),
            }
        )
    )
    job.out.append(WriteStatus(content=job.status()))
    job.send(job.members.in_order(), Shutdown(code=code, reason=reason))
    job.out.append(SendOperators(message=JobEnded(code=code, reason=reason)))
    job.out.append(Exit(code=code, reason=reason))


def on_training_finished(job: Job, node: NodeId, message: TrainingFinished, now: float) -> None:
    """A worker is at the end of the script, and its final version is committed."""
    job.seats.finished[message.rank] = message


def all_finished(job: Job) -> bool:
    """Every rank finished training in the current generation."""
    return all(
        rank in job.seats.finished and job.seats.finished[rank].generation == job.generation
        for rank in range(job.config.job.layout.world_size)
    )


def finish(job: Job, now: float) -> None:
    """Every rank is at the end of the script: let the workers go."""
    planned.end(job, "training is over", now)
    job.state = State.FINISHING
    job.ledger.highest = max(job.ledger.highest, *(done.iteration for done in job.seats.finished.values()))
    job.timers.keep_only(())
    job.timers.start("exit", now + job.config.deadlines.exit_s)
    job.send(job.members.active, Finish(generation=job.generation))


def on_exit_at_end(job: Job, node: NodeId, message: WorkerExited, now: float) -> None:
    """A worker ended after Finish, when every rank was at the end of the script: only an error of its own matters."""
    if message.script_error:
        stop(job, 1, message.script_error)
        return
    if message.status != 0:
        reason = f"the worker of seat {message.rank} ended with status {message.status} after the end of the script"
        job.log("warning", node=node, rank=message.rank, reason=reason)
    note_clean_exit(job, message.rank, now)


def note_clean_exit(job: Job, rank: Rank, now: float) -> None:
    """A worker ended by itself; when all have, the job is done."""
    job.exited.add(rank)
    if len(job.exited) == job.config.job.layout.world_size:
        done = job.state is State.FINISHING
        stop(job, 0, "training finished" if done else "the script ended by itself on every rank")
    elif not job.timers.running("finish") and not job.timers.running("exit"):
        job.timers.start("finish", now + job.config.deadlines.finish_s)


def on_lost_at_end(job: Job, lost: dict[NodeId, tuple[Rank, ...]], failures: list[Failure], now: float) -> None:
    """Nodes were lost after Finish: nothing of theirs is needed any more."""
    for failure in failures:
        job.note_failure(failure)
    for node, seats in lost.items():
        job.log("node_lost", node=node, seats=list(seats), reason=job.members.gone.get(node, ""))
        for rank in seats:
            if job.state is State.FINISHING:
                note_clean_exit(job, rank, now)


def on_finish_over(job: Job, subject: str, now: float) -> None:
    """Some workers ended by themselves and others went on for too long."""
    still = [rank for rank in range(job.config.job.layout.world_size) if rank not in job.exited]
    limit = job.config.deadlines.finish_s
    stop(job, 3, f"seats {still} did not end within {limit:g} s after the first worker ended by itself", tuple(still))


def on_exit_over(job: Job, subject: str, now: float) -> None:
    """Workers at the end of the script did not go in time: everything they had to say is known."""
    still = [rank for rank in range(job.config.job.layout.world_size) if rank not in job.exited]
    limit = job.config.deadlines.exit_s
    job.log("warning", reason=f"workers of seats {still} did not exit within {limit:g} s after the end of the script")
    stop(job, 0, "training finished")
