"""The agent process of one node: an asyncio shell around :class:`~deadpool_ext.control.agent_state.AgentState`.

Its death is the node's death: fork server, workers and replicator die with it, and the memory it owns goes away.
Events are handled in the order in which they arrive; effects are carried out one after the other by a single task,
so that allocating memory (seconds, for large shards) delays neither heartbeats nor messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from deadpool_ext.control import processes
from deadpool_ext.control.agent_events import (
    AddReplicatorFault,
    AnnounceArena,
    CarryOut,
    ConfigureReplicator,
    DropSegments,
    Effect,
    EnsureSegments,
    Event,
    FenceBoard,
    FetchSeat,
    ForkWorkers,
    FreezeReplicator,
    FromCoordinator,
    InspectWorker,
    KillWorker,
    Leave,
    ReleaseReplicator,
    ReplicatorEnded,
    RunHealthChecks,
    SendFenceAck,
    StartReplicator,
    Tick,
    ToCoordinator,
    ToWorker,
    VoidAbove,
    WorkerEnded,
)
from deadpool_ext.control.agent_faults import Targets, carry_out
from deadpool_ext.control.agent_state import EXIT_BROKEN, AgentState
from deadpool_ext.control.forkserver import (
    Exited,
    Forked,
    ForkServer,
    ForkServerConfig,
    ForkServerError,
    PreloadFailed,
    ServerReady,
)
from deadpool_ext.control.gpus import Gpus
from deadpool_ext.control.health import OomWatch, Surroundings, run_checks
from deadpool_ext.control.node_memory import NodeMemory
from deadpool_ext.control.replicator_link import ReplicatorLink
from deadpool_ext.control.wire import Connection, WireError, new_secret
from deadpool_ext.control.worker_links import DELIVERY_DEADLINE_S, WorkerLinks
from deadpool_ext.protocol.messages import (
    ArenaReady,
    Emit,
    FenceAck,
    HealthReport,
    Heartbeat,
    Hello,
    Inspected,
    Leaving,
    NodeAddress,
    Welcome,
    WorkerExited,
)
from deadpool_ext.replication.errors import ArenaMemoryError

EXIT_COORDINATOR_LOST: Final = 3
TICK_S: Final = 0.1
RECONNECT_S: Final = 0.1
DEFAULT_HEARTBEAT_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One node of a job. ``workers`` warm workers are kept; ``host`` is where other nodes reach this one."""

    node: str
    job_id: str
    workers: int
    coordinator: tuple[str, int]
    secret: bytes = field(repr=False)
    host: str = "127.0.0.1"
    preload: tuple[str, ...] = ()
    connect_deadline_s: float = 30.0


class Agent:
    """The shell. Everything runs on one event loop; only the creation of segments runs on a helper thread."""

    def __init__(
        self, config: AgentConfig, fork_server: ForkServer, replicator: ReplicatorLink, worker_secret: bytes
    ) -> None:
        self._config = config
        self._fork_server = fork_server
        self._replicator = replicator
        self._socket_name = f"deadpool-{config.job_id}-{config.node}-{secrets.token_hex(8)}"
        self._memory = NodeMemory()
        self._state = AgentState(config.node, config.workers, self._memory.board.path)
        self._process = secrets.token_hex(8)
        self._workers = WorkerLinks(worker_secret, self._handle)
        self._effects: asyncio.Queue[Effect] = asyncio.Queue()
        self._coordinator: Connection | None = None
        self._heartbeat_s = DEFAULT_HEARTBEAT_S
        self._tasks: set[asyncio.Task[None]] = set()
        self._checking = asyncio.Lock()
        self._nvml: Gpus | None = None
        self._oom = OomWatch()
        self._left: asyncio.Future[Leave] = asyncio.get_running_loop().create_future()

    # ---- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Be the node until the job is over; returns the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopped)
        server = await asyncio.start_unix_server(self._workers.accept, path=f"\0{self._socket_name}")
        loop.add_reader(self._fork_server.fileno(), self._on_fork_server)
        for work in (
            self._carry_out_all(),
            self._beat(),
            self._tick(),
            self._watch_health(),
            self._talk_to_coordinator(),
        ):
            self._spawn(work)
        self._push(self._state.start())
        try:
            leave = await self._left
            if leave.reason and leave.code:
                print(f"deadpool: node {self._config.node}: {leave.reason}", file=sys.stderr, flush=True)
            return leave.code
        finally:
            loop.remove_reader(self._fork_server.fileno())
            server.close()
            for task in tuple(self._tasks):
                task.cancel()
            self._end_processes()
            if self._coordinator is not None:
                self._coordinator.close()
                await self._coordinator.wait_closed()
            self._workers.close()
            self._memory.close()

    def _end_processes(self) -> None:
        for pid in processes.descendants(os.getpid()):
            processes.send_signal(pid, signal.SIGKILL)
        self._fork_server.close()
        self._replicator.close()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            self._leave(EXIT_BROKEN, f"internal error in the agent: {error!r}")

    def _stopped(self) -> None:
        """SIGTERM, from the user by way of the launcher: say goodbye, so that nobody has to wonder."""
        self._send(Leaving(node=self._config.node, reason="it was stopped by its user"))
        self._leave(128 + signal.SIGTERM, "")  # the launcher has said it

    def _leave(self, code: int, reason: str) -> None:
        if not self._left.done():
            self._left.set_result(Leave(code=code, reason=reason))

    def _handle(self, event: Event) -> None:
        self._push(self._state.handle(event, time.monotonic()))

    def _push(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._effects.put_nowait(effect)

    async def _beat(self) -> None:
        while True:
            if self._coordinator is not None:
                self._coordinator.send(
                    Heartbeat(node=self._config.node, vitals=self._workers.look(self._state.seats()))
                )
            await asyncio.sleep(self._heartbeat_s)

    async def _tick(self) -> None:
        while True:
            self._handle(Tick())
            await asyncio.sleep(TICK_S)

    # ---- coordinator -----------------------------------------------------------------------------------------------

    async def _talk_to_coordinator(self) -> None:
        try:
            connection, address = await self._join()
            connection.send(
                Hello(
                    node=self._config.node,
                    pid=os.getpid(),
                    workers=self._config.workers,
                    address=address,
                    process=self._process,
                )
            )
            self._coordinator = connection
            while True:
                message = await connection.receive()
                if isinstance(message, Welcome):
                    role = " as a spare" if message.spare else ""
                    print(f"deadpool: node {self._config.node} is in job {message.job.job_id}{role}", flush=True)
                    self._heartbeat_s = message.job.options.get("heartbeat_s", DEFAULT_HEARTBEAT_S)
                self._handle(FromCoordinator(message=message))
        except (WireError, OSError, TimeoutError) as error:
            # What it said last (Refused, Shutdown) is still in the queue and comes first.
            self._effects.put_nowait(Leave(code=EXIT_COORDINATOR_LOST, reason=f"the coordinator is gone: {error}"))

    async def _join(self) -> tuple[Connection, NodeAddress]:
        async with asyncio.timeout(self._config.connect_deadline_s):
            host, port = self._replicator.address
            while True:
                try:
                    reader, writer = await asyncio.open_connection(*self._config.coordinator)
                    break
                except OSError:  # started before the coordinator, or its machine is not reachable yet
                    await asyncio.sleep(RECONNECT_S)
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = await Connection.open(reader, writer, self._config.secret, client=True)
        return connection, NodeAddress(node=self._config.node, host=host, port=port)

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _on_fork_server(self) -> None:
        try:
            reports = self._fork_server.reports()
        except ForkServerError as error:
            asyncio.get_running_loop().remove_reader(self._fork_server.fileno())
            self._leave(EXIT_BROKEN, str(error))
            return
        for report in reports:
            match report:
                case ServerReady():
                    if report.threads != 1:
                        print(
                            f"deadpool: node {self._config.node}: the fork server has {report.threads} threads after "
                            "its imports; workers may inherit locks that are held",
                            file=sys.stderr,
                        )
                case PreloadFailed():
                    self._leave(EXIT_BROKEN, f"a preload failed: {report.detail}")
                case Forked():
                    if not self._replicator.forked(report.token, report.pid):
                        self._workers.forked(report.token, report.pid)
                case Exited() if report.pid == self._replicator.pid:
                    self._replicator.ended(self._on_replicator)
                    self._handle(ReplicatorEnded(status=report.status))
                case Exited():
                    self._spawn(self._worker_exited(report))

    async def _worker_exited(self, report: Exited) -> None:
        token = await self._workers.ended(report.pid)
        if token is None:
            return
        self._kill_orphans()
        starved = report.status == -signal.SIGKILL and self._oom.more()
        self._handle(WorkerEnded(token=token, status=report.status, cause="memory" if starved else ""))

    def _kill_orphans(self) -> None:
        """End what a dead worker left behind: it is our child now (see :func:`processes.adopt_orphans`)."""
        for pid in processes.children(os.getpid()):
            if pid != self._fork_server.pid:
                processes.kill_tree(pid)
                processes.reap(pid)

    # ---- replicator ------------------------------------------------------------------------------------------------

    def _on_replicator(self, item: Event | ToCoordinator) -> None:
        if isinstance(item, ToCoordinator):
            self._push([item])
        else:
            self._handle(item)

    # ---- effects ---------------------------------------------------------------------------------------------------

    async def _carry_out_all(self) -> None:
        refused = False
        while True:
            effect = await self._effects.get()
            if refused and not isinstance(effect, ToCoordinator | Leave):
                continue
            try:
                await self._carry_out(effect)
            except ArenaMemoryError as error:
                refused = True  # what follows needs the memory that is not there
                self._refuse_memory(error)

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case ToCoordinator():
                self._send(effect.message)
            case ToWorker():
                self._workers.send(effect.token, effect.message)
            case ForkWorkers():
                with contextlib.suppress(ForkServerError):  # its end is reported on its own
                    self._fork_server.fork_workers(effect.tokens, self._socket_name)
            case KillWorker():
                await self._kill(effect.token)
            case InspectWorker():
                self._spawn(self._inspect(effect))
            case FenceBoard():
                self._memory.board.fence(effect.generation)
            case StartReplicator():
                if effect.after_death:
                    self._memory.reset_hosted()
                with contextlib.suppress(ForkServerError):  # its end is reported on its own
                    self._replicator.start(self._fork_server, self._on_replicator)
            case FreezeReplicator():
                self._replicator.freeze(effect.generation)
            case EnsureSegments():
                await asyncio.to_thread(self._memory.ensure, effect)
            case VoidAbove():
                self._memory.void_above(effect.version)
            case DropSegments():
                self._memory.drop()
            case ConfigureReplicator():
                self._replicator.configure(effect.replicate, self._memory, self._state.job)
            case FetchSeat():
                self._replicator.fetch(effect, self._memory)
            case AnnounceArena():
                path = self._memory.own[effect.rank].path
                ready = ArenaReady(generation=effect.generation, rank=effect.rank, segment_path=path)
                self._workers.send(effect.token, ready)
            case SendFenceAck():
                own, hosted = self._memory.inventory()
                self._send(
                    FenceAck(
                        node=self._config.node,
                        generation=effect.generation,
                        workers=effect.workers,
                        own=own,
                        hosted=hosted,
                    )
                )
            case RunHealthChecks():
                self._spawn(self._report_health(effect.number))
            case CarryOut():
                await self._carry_out_fault(effect)
            case AddReplicatorFault():
                self._replicator.add_fault(effect.fault)
            case ReleaseReplicator():
                self._replicator.release_fault(effect.fault_id)
            case Leave():
                self._leave(effect.code, effect.reason)

    async def _kill(self, token: str) -> None:
        if problem := await self._workers.kill(token):
            self._leave(EXIT_BROKEN, problem)

    async def _inspect(self, effect: InspectWorker) -> None:
        stack = await self._workers.stack(effect.token)
        self._send(
            Inspected(
                node=self._config.node,
                rank=effect.rank,
                number=effect.number,
                stack=stack.frames,
                problem=stack.problem,
            )
        )

    async def _report_health(self, number: int) -> None:
        job = self._state.job
        async with self._checking:
            if self._nvml is None:
                self._nvml = await asyncio.to_thread(Gpus.find)
            around = Surroundings(
                node=self._config.node,
                log_dir=job.log_dir if job is not None else "",
                script=str(job.policy.get("health_check", "")) if job is not None else "",
                gpus=self._nvml,
            )
            findings, seconds = await asyncio.to_thread(run_checks, around)
        self._send(HealthReport(node=self._config.node, number=number, findings=findings, seconds=seconds))

    async def _watch_health(self) -> None:
        while True:
            job = self._state.job
            await asyncio.sleep(job.options.get("health_period_s", 60.0) if job is not None else 1.0)
            if job is not None:
                await self._report_health(0)

    async def _carry_out_fault(self, effect: CarryOut) -> None:
        targets = Targets(agent=os.getpid(), worker=self._workers.pid(effect.token), replicator=self._replicator.pid)
        await carry_out(effect.strike, targets, self._memory, self._send_now, self._warn)

    async def _send_now(self, message: object) -> None:
        """Send, and wait (bounded) until it left: what comes next may end this process."""
        if self._coordinator is not None:
            self._coordinator.send(message)
            with contextlib.suppress(TimeoutError, WireError):
                async with asyncio.timeout(DELIVERY_DEADLINE_S):
                    await self._coordinator.drain()

    def _warn(self, text: str) -> None:
        fields = {"text": text}
        node, generation = self._config.node, self._state.generation
        self._send(Emit(event="warning", generation=generation, node=node, rank=None, fields=fields))

    def _send(self, message: object) -> None:
        if self._coordinator is not None:
            self._coordinator.send(message)

    def _refuse_memory(self, error: ArenaMemoryError) -> None:
        """The job cannot run here: said as a worker's own error, so that it ends with this line (and is refused)."""
        self._send(
            WorkerExited(
                rank=self._state.first_rank(),
                generation=self._state.generation,
                status=1,
                script_error=f"node {self._config.node}: {error}",
            )
        )


def run_agent(config: AgentConfig) -> int:
    """Process main of a node. Call in a single-threaded process; returns the exit code when the job is over."""
    processes.name_process(f"dp-agent {config.node}")
    worker_secret = new_secret()
    # Forked before the event loop and any thread exist, and before there is anything that it must not inherit.
    fork_server = ForkServer.start(
        ForkServerConfig(
            node=config.node,
            secret=worker_secret,
            job_secret=config.secret,
            preload=config.preload,
            host=config.host,
        )
    )
    replicator = ReplicatorLink(config.node, config.host)
    processes.adopt_orphans()

    async def main() -> int:
        return await Agent(config, fork_server, replicator, worker_secret).run()

    return asyncio.run(main())
