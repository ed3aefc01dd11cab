"""An agent's side of its workers: processes, connections, and what each shows of itself once it has a seat."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from deadpool_ext.comm.pulse import Pulse
from deadpool_ext.control import processes
from deadpool_ext.control.agent_events import Event, FromWorker, WorkerJoined
from deadpool_ext.control.stacks import Stack, StackFile
from deadpool_ext.control.vitals import Sampler
from deadpool_ext.control.wire import Connection, WireError
from deadpool_ext.protocol.messages import TakeSeat, Vital, WorkerHello
from deadpool_ext.protocol.types import Rank

DELIVERY_DEADLINE_S: Final = 1.0
KILL_DEADLINE_S: Final = 10.0  # by which a killed process is gone, or it never will be (uninterruptible I/O)
_PEER_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


@dataclass(slots=True)
class WorkerLink:
    """One worker."""

    pid: int = 0
    connection: Connection | None = None
    receiver: asyncio.Task[None] | None = None
    pulse: Pulse | None = None
    stack: StackFile | None = None

    def close(self) -> None:
        """The process is gone."""
        for shown in (self.pulse, self.stack):
            if shown is not None:
                shown.close()
        self.pulse = self.stack = None


class WorkerLinks:
    """All workers of a node, by token. For the agent's event loop."""

    def __init__(self, secret: bytes, handle: Callable[[Event], None]) -> None:
        """``secret``: the workers' own. ``handle``: takes what they say, in order."""
        self._secret = secret
        self._handle = handle
        self._links: dict[str, WorkerLink] = {}
        self._sampler = Sampler()

    def forked(self, token: str, pid: int) -> None:
        """The fork server made it; it connects soon."""
        self._links.setdefault(token, WorkerLink()).pid = pid

    def pid(self, token: str | None) -> int:
        """Of a live worker; 0 for a token that names none."""
        link = self._links.get(token or "")
        return link.pid if link is not None else 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection on the workers' socket to its end."""
        link: WorkerLink | None = None
        try:
            pid = _peer_of_same_user(writer.get_extra_info("socket"))
            connection = await Connection.open(reader, writer, self._secret, client=False)
            hello = await connection.receive()
            if not isinstance(hello, WorkerHello) or hello.pid != pid:
                raise WireError("not a worker")
            link = self._links.setdefault(hello.token, WorkerLink())
            link.pid, link.connection, link.receiver = pid, connection, asyncio.current_task()
            self._handle(WorkerJoined(token=hello.token, pid=pid, start_ticks=processes.start_ticks(pid)))
            while True:
                self._handle(FromWorker(token=hello.token, message=await connection.receive()))
        except WireError:
            pass  # its end is reported by the fork server, a stranger is of no interest
        finally:
            if link is not None:
                link.connection = None
            writer.close()

    async def ended(self, pid: int) -> str | None:
        """A process was reaped: what it said before its end has been handled when this returns its token."""
        token = next((token for token, link in self._links.items() if link.pid == pid), None)
        if token is None:
            return None
        link = self._links[token]
        if link.receiver is not None:
            # Bounded: a process that it started may hold the connection open.
            await asyncio.wait({link.receiver}, timeout=DELIVERY_DEADLINE_S)
        del self._links[token]
        link.close()
        self._sampler.forget(token)
        return token

    def send(self, token: str, message: object) -> None:
        """Queue a message. With its seat a worker gets the places where it shows itself."""
        link = self._links.get(token)
        if link is not None and link.connection is not None:
            if isinstance(message, TakeSeat):
                link.pulse, link.stack = Pulse.create(), StackFile()
                message = replace(message, pulse_path=link.pulse.path, stack_path=link.stack.path)
            link.connection.send(message)

    def look(self, seats: Iterable[tuple[str, Rank]]) -> tuple[Vital, ...]:
        """At every worker that has a seat."""
        found = []
        for token, rank in seats:
            link = self._links.get(token)
            if link is not None and link.pulse is not None:
                vital = self._sampler.look(token, rank, link.pid, link.pulse)
                found += [vital] if vital is not None else []
        return tuple(found)

    async def stack(self, token: str) -> Stack:
        """Where its main thread is, asked for now; bounded."""
        link = self._links.get(token)
        if link is None or link.stack is None:
            return Stack(problem="the process is gone")
        return await link.stack.ask(link.pid)

    async def kill(self, token: str) -> str:
        """SIGKILL to a worker and everything below it; stopped processes die of it too. Empty when it is dead.

        Else what is wrong: it still has the slots mapped, so nothing else may happen on this node.
        """
        pid = self.pid(token)
        if not pid:
            return ""
        hit = processes.kill_tree(pid)
        if await asyncio.to_thread(processes.wait_dead, hit, KILL_DEADLINE_S):
            return ""
        return f"a worker (pid {pid}) does not die within {KILL_DEADLINE_S:g} s of SIGKILL"

    def close(self) -> None:
        """All processes are gone."""
        for link in self._links.values():
            link.close()


def _peer_of_same_user(sock: socket.socket) -> int:
    """Pid at the other end of a unix socket. Raises WireError if it belongs to another user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise WireError(f"a process of user {uid} tried to connect as a worker")
    return int(pid)
