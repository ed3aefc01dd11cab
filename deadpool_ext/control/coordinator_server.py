"""The coordinator process: a TCP server around the pure machine. Events in, effects out, and no decision of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deadpool_ext.control.processes import name_process
from deadpool_ext.control.rundir import RunDirectory
from deadpool_ext.control.wire import Connection, WireError
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.coordinator import Coordinator
from deadpool_ext.protocol.effects import (
    Disconnect,
    Effect,
    Event,
    Exit,
    FromNode,
    FromOperator,
    Log,
    NodeLost,
    Refuse,
    Send,
    SendOperators,
    Tick,
    WriteFinal,
    WriteStatus,
    WriteStep,
)
from deadpool_ext.protocol.messages import Hello, JobEnded, OperatorHello, Progress, Refused
from deadpool_ext.protocol.types import invariant

TICK_S: Final = 0.05
FLUSH_DEADLINE_S: Final = 2.0
EXIT_INTERNAL: Final = 70


@dataclass(frozen=True, kw_only=True)
class CoordinatorStart:
    """What a coordinator process needs: the job, where to write, the listening socket, and the job's secret."""

    config: CoordinatorConfig
    run_dir: Path
    listener: socket.socket
    secret: bytes = field(repr=False)
    reachable_at: str = ""  # host name for commands; empty: where it listens


class CoordinatorServer:
    """One job's server. Everything runs on one event loop, in the order in which things arrive."""

    def __init__(self, start: CoordinatorStart) -> None:
        self._start = start
        self._machine = Coordinator(start.config)
        self._files = RunDirectory(start.run_dir)
        self._ids = itertools.count(1)
        self._open: dict[int, Connection] = {}
        self._nodes: dict[str, int] = {}  # node -> id of its bound connection
        self._operators: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Serve until the machine exits; returns the job's exit code."""
        host, port = self._start.listener.getsockname()[:2]
        server = await asyncio.start_server(self._accept, sock=self._start.listener)
        self._files.control(self._start.reachable_at or host, port, self._start.secret)
        ticker = asyncio.create_task(self._tick())
        try:
            return await self._exit
        finally:
            ticker.cancel()
            server.close()
            await self._flush()
            for task in tuple(self._tasks):
                task.cancel()
            self._files.close()

    async def _tick(self) -> None:
        while not self._exit.done():
            self._handle(Tick())
            wake = self._machine.wake_at
            pause = TICK_S if wake is None else min(TICK_S, max(0.0, wake - time.monotonic()))
            await asyncio.sleep(max(0.001, pause))

    # ---- connections -----------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = next(self._ids)
        try:
            connection = await Connection.open(reader, writer, self._start.secret, client=False)
            self._open[number] = connection
            while True:
                self._receive(number, await connection.receive())
        except WireError as error:
            self._ended(number, str(error))
        finally:
            self._open.pop(number, None)
            self._operators.discard(number)
            writer.close()

    def _receive(self, number: int, message: Any) -> None:
        if isinstance(message, Hello):
            self._handle(FromNode(node=message.node, message=message, connection=number), hello=number)
        elif isinstance(message, OperatorHello):
            self._operators.add(number)
            self._handle(FromOperator(message=message))
        elif number in self._operators:
            self._handle(FromOperator(message=message))
        elif (node := self._node_of(number)) is not None:
            self._handle(FromNode(node=node, message=message, connection=number))
        # Else: a connection that was refused or declared lost; what it still says has no effect (INV-4).

    def _node_of(self, number: int) -> str | None:
        return next((node for node, bound in self._nodes.items() if bound == number), None)

    def _ended(self, number: int, reason: str) -> None:
        node = self._node_of(number)
        if node is not None:
            del self._nodes[node]
            self._handle(NodeLost(node=node, reason=f"connection to its agent: {reason}"))

    # ---- machine ---------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, hello: int | None = None) -> None:
        if self._exit.done():
            return
        try:
            effects = self._machine.handle(event, time.monotonic())
            if hello is not None and isinstance(event, FromNode):
                self._bind(event.node, hello, effects)
            self._carry_out(effects)
        except Exception as error:  # a bug in the machine ends the job with its traceback, never in a hang (INV-7)
            traceback.print_exc()
            self._stop(EXIT_INTERNAL, f"internal error in the coordinator: {error!r}", tell=True)

    def _bind(self, node: str, number: int, effects: list[Effect]) -> None:
        if not any(isinstance(effect, Refuse) and effect.connection == number for effect in effects):
            self._nodes[node] = number

    def _carry_out(self, effects: list[Effect]) -> None:
        status: WriteStatus | None = None
        for effect in effects:
            match effect:
                case Send():
                    if (connection := self._open.get(self._nodes.get(effect.node, 0))) is not None:
                        connection.send(effect.message)
                case Refuse():
                    if (connection := self._open.get(effect.connection)) is not None:
                        connection.send(Refused(reason=effect.reason))
                        connection.close()
                case Disconnect():
                    number = self._nodes.pop(effect.node, 0)
                    if (connection := self._open.get(number)) is not None:
                        connection.close()
                case SendOperators():
                    self._tell_operators(effect.message)
                case Log():
                    self._log(effect)
                case WriteStep():
                    self._files.step(effect.record)
                    self._tell_operators(Progress(kind="step", record=effect.record))
                case WriteFinal():
                    self._files.final(effect.content)
                case WriteStatus():
                    status = effect
                case Exit():
                    invariant(effect is effects[-1], "Exit is the last effect")
                    self._stop(effect.code, effect.reason, tell=False)
        if status is not None:
            self._files.status(status.content)

    def _log(self, effect: Log) -> None:
        record = self._files.event(
            effect.event,
            generation=effect.generation,
            node=effect.node,
            rank=effect.rank,
            fields=effect.fields,
            mono=effect.mono,
        )
        self._tell_operators(Progress(kind="event", record=record))

    def _tell_operators(self, message: object) -> None:
        for number in self._operators:
            if (connection := self._open.get(number)) is not None:
                connection.send(message)

    def _stop(self, code: int, reason: str, *, tell: bool) -> None:
        if tell:
            self._tell_operators(JobEnded(code=code, reason=reason))
        if not self._exit.done():
            self._exit.set_result(code)

    async def _flush(self) -> None:
        """Give what is queued a bounded time to leave, then close."""
        connections = list(self._open.values())
        for connection in connections:
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_DEADLINE_S):
                await asyncio.gather(*(connection.wait_closed(FLUSH_DEADLINE_S) for connection in connections))


async def _serve(start: CoordinatorStart) -> int:
    return await CoordinatorServer(start).run()


def run_coordinator(start: CoordinatorStart) -> int:
    """Process main: serve the job until it ends; returns its exit code. Runs its own event loop."""
    name_process("dp-coordinator")
    try:
        return asyncio.run(_serve(start))
    except OSError as error:
        print(f"deadpool: the coordinator cannot serve: {error}", file=sys.stderr)
        return EXIT_INTERNAL


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises OSError."""
    return socket.create_server((host, port), backlog=128)
