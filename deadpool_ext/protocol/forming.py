"""Admission of nodes (at any time), and the start of the job up to the commit of the initial version."""

from __future__ import annotations

from deadpool_ext.protocol import ending
from deadpool_ext.protocol.effects import Refuse, Send
from deadpool_ext.protocol.layout import node_key
from deadpool_ext.protocol.messages import (
    CollectiveFailed,
    Committed,
    Hello,
    HostStore,
    NodeReady,
    Rendezvous,
    SpecDeclared,
    StoreReady,
    Welcome,
    WorkerExited,
)
from deadpool_ext.protocol.state import Job, State
from deadpool_ext.protocol.types import NodeId

#: Cause of an error that another rank's end provoked.
ECHO = "connection"


def on_hello(job: Job, message: Hello, connection: int, now: float) -> None:
    """Admit or refuse a node, in any state; admission never disturbs what is under way."""
    reason = "the job is over" if job.state is State.STOPPED else job.members.refusal(message)
    if reason is not None:
        job.out.append(Refuse(node=message.node, connection=connection, reason=reason))
        if job.state is not State.STOPPED:
            job.log("warning", node=message.node, reason=f"node refused: {reason}")
        return
    # While the job forms this is a forecast: who gets seats is decided by name among the nodes that are warm then.
    before = sum(node_key(node) < node_key(message.node) for node in job.members.members)
    spare = job.state is not State.FORMING or before >= job.config.nodes
    job.members.admit(message, now)
    job.departed.discard(message.node)
    job.out.append(Send(node=message.node, message=Welcome(job=job.config.job, spare=spare)))


def _expected(job: Job) -> set[NodeId]:
    """Names that the launchers give to the nodes that the job was started with; others may come too."""
    return {f"n{number}" for number in range(job.config.nodes + job.config.spares)}


def on_ready_forming(job: Job, node: NodeId, message: NodeReady, now: float) -> None:
    """A node is warm: start as soon as all nodes that can still come are."""
    job.members.members[node].ready = True
    start_if_formed(job, now)


def start_if_formed(job: Job, now: float) -> None:
    """Start if everybody expected is warm; start the spares' grace if enough are."""
    ready = len(job.members.in_order(ready=True))
    expected = job.config.nodes + job.config.spares - len(job.departed)
    if ready < job.config.nodes:
        job.timers.cancel("spare_wait")  # one that was warm has left
        return
    if ready >= expected:
        start(job, now)
    elif not job.timers.running("spare_wait"):
        job.timers.start("spare_wait", now + job.config.deadlines.spare_wait_s)


def on_ready_later(job: Job, node: NodeId, message: NodeReady, now: float) -> None:
    """A node that joined after the start is warm: a spare from now on."""
    member = job.members.members[node]
    if not member.ready:
        member.ready = True
        job.log("spare_joined", node=node, spares=len(job.members.spares))


def on_spare_wait_over(job: Job, subject: str, now: float) -> None:
    """Enough nodes are warm and the missing spares had their time."""
    start(job, now)


def on_join_over(job: Job, subject: str, now: float) -> None:
    """Too few nodes came."""
    ready = len(job.members.in_order(ready=True))
    ending.stop(job, 3, f"only {ready} of {job.config.nodes} nodes were ready within {job.config.deadlines.join_s:g} s")


def on_lost_forming(job: Job, lost: list[NodeId], reason: str, now: float) -> None:
    """Nodes left before the start. One that nobody had counted on changes nothing by leaving."""
    job.departed.update(set(lost) & _expected(job))
    left = job.config.nodes + job.config.spares - len(job.departed)
    if left < job.config.nodes and len(job.members.members) < job.config.nodes:
        ending.stop(
            job, 3, f"lost node {', '.join(lost)} during set-up ({reason}): {left} of {job.config.nodes} nodes are left"
        )
    else:
        start_if_formed(job, now)


def start(job: Job, now: float) -> None:
    """Seat the first nodes by name and construct everywhere together."""
    layout = job.config.job.layout
    expected = _expected(job)
    warm = sorted(job.members.in_order(ready=True), key=lambda node: node not in expected)  # guests come last
    fit = [node for node in warm if not job.members.members[node].unfit]
    chosen = [*fit, *(node for node in warm if node not in fit)][: job.config.nodes]
    job.members.seat([node for node in warm if node in chosen])
    job.state = State.STARTING
    job.timers.keep_only(())
    job.timers.start("setup", now + job.config.deadlines.setup_s)
    job.log(
        "job_start",
        job_id=job.config.job.job_id,
        nodes=job.members.active,
        spares=job.members.spares,
        world_size=layout.world_size,
        ranks_per_node=layout.ranks_per_node,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        data_parallel=layout.data_parallel,
    )
    job.log("generation_start", seats={node: list(job.members.seats_of(node)) for node in job.members.active})
    for node in job.members.spares:
        if job.members.members[node].ready:
            job.log("spare_joined", node=node, spares=len(job.members.spares))
    bare = [rank for rank, peers in enumerate(job.replica_map) if not peers]
    if bare:
        job.log("warning", reason=f"seats {bare} have no peer in another failure domain and are unprotected")
    for node in job.members.active:
        job.assign(node, job.members.seats_of(node), now, solo=False)
    job.send([job.members.seat_nodes[0]], HostStore(generation=job.generation, rank=0))


def on_store_starting(job: Job, node: NodeId, message: StoreReady, now: float) -> None:
    """The first rendezvous store is open."""
    if not job.store_opened:
        job.store_opened = True
        job.send(job.members.active, Rendezvous(generation=job.generation, host=message.host, port=message.port))


def on_spec_starting(job: Job, node: NodeId, message: SpecDeclared, now: float) -> None:
    """A worker is at ``train()`` entry; when all are, arenas are made and replication starts."""
    if message.spec.rank in job.specs:
        return
    job.specs[message.spec.rank] = message.spec
    job.facts[message.spec.rank] = message.facts
    if len(job.specs) == job.config.job.layout.world_size:
        job.send(job.members.active, job.replicate())


def on_committed_starting(job: Job, node: NodeId, message: Committed, now: float) -> None:
    """A node saw the initial version committed; when all have, the job can survive losses."""
    job.initial_commits.add(node)
    job.began_at = message.version.v
    if job.initial_commits.issuperset(job.members.active):
        job.state = State.RUNNING
        job.timers.cancel("setup")
        job.timers.start("stall", now + job.config.deadlines.stall_s)
        for fault in job.strikes.timed:
            job.timers.start(f"fault:{fault.id}", now + (fault.after_s or 0.0))


def on_exit_starting(job: Job, node: NodeId, message: WorkerExited, now: float) -> None:
    """A worker ended before there was a version to go back to."""
    where = f"the worker of seat {message.rank} on {node}"
    if message.script_error:
        # The error may be the echo of a node's death that is not known yet: give that its time.
        # Of several ranks that raise, those that only lost their connection to another one tell nothing.
        echo = message.cause == ECHO
        if not job.script_error or (job.script_error_is_echo and not echo):
            job.script_error, job.script_error_is_echo = message.script_error, echo
        if not job.timers.running("grace"):
            job.timers.start("grace", now + job.config.deadlines.collective_grace_s)
    elif message.status == 0:
        ending.note_clean_exit(job, message.rank, now)
    elif message.status > 0:
        ending.stop(job, 1, f"{where} ended with exit code {message.status} during set-up; see its log")
    else:
        ending.stop(
            job,
            3,
            f"{where} was killed by signal {-message.status} during set-up, before a version was committed",
            (message.rank,),
        )


def on_collective_starting(job: Job, node: NodeId, message: CollectiveFailed, now: float) -> None:
    """A collective failed in set-up: wait for what explains it."""
    if job.suspicion is None:
        job.suspicion = (now, f"seat {message.rank} on {node} left a collective: {message.detail}")
    if not job.timers.running("grace"):
        job.timers.start("grace", now + job.config.deadlines.collective_grace_s)


def on_grace_starting(job: Job, subject: str, now: float) -> None:
    """Nothing explained the failed collective, or the script's error."""
    if job.script_error:
        ending.stop(job, 1, job.script_error)
        return
    what = job.suspicion[1] if job.suspicion else "a collective failed"
    ending.stop(job, 3, f"set-up failed before a version was committed: {what}")


def on_setup_over(job: Job, subject: str, now: float) -> None:
    """Set-up took too long: say what is missing."""
    world = range(job.config.job.layout.world_size)
    silent = [rank for rank in world if rank not in job.specs]
    if not job.store_opened:
        what = "no rendezvous store was opened on seat 0"
    elif silent:
        what = f"seats {silent} did not reach train()"
    else:
        nodes = [node for node in job.members.active if node not in job.initial_commits]
        what = f"the initial version was not committed on {', '.join(nodes)}"
    ending.stop(job, 3, f"set-up did not end within {job.config.deadlines.setup_s:g} s: {what}", tuple(silent))
