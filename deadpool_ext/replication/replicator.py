"""The replicator: a process beside a node's workers that moves sealed slots to peers and agrees on commits.

It owns nothing: slots and board are the agent's memory, and everything it holds of a generation goes when the next
one begins. One event loop, no torch. See ``commands`` for what the agent tells it, ``generation`` for what it keeps.
"""

from __future__ import annotations

import asyncio
import signal
import socket

from deadpool_ext.protocol.types import DeadpoolError
from deadpool_ext.replication import commands, incoming, outgoing
from deadpool_ext.replication.commands import (
    AddFault,
    Command,
    Configure,
    Configured,
    DropConnections,
    FaultOver,
    Fetch,
    FetchFailed,
    Freeze,
    Frozen,
    Problem,
    Reply,
    Stop,
)
from deadpool_ext.replication.errors import AuthenticationError, ProtocolError
from deadpool_ext.replication.generation import CONNECTION_FAILURES, Generation
from deadpool_ext.replication.transport import tcp
from deadpool_ext.replication.transport.handshake import Answered, Hello, Verdict
from deadpool_ext.replication.transport.tcp import Channel

_MAX_CONNECTIONS = 4096
_MAX_UNREAD_BYTES = 16 * 2**20  # replies that the agent has not taken
_ACCEPT_PAUSE_S = 0.1  # after a failed accept (descriptors exhausted): not a busy loop


def run_replicator(command_socket: socket.socket, listener: socket.socket, secret: bytes, node: str) -> None:
    """Main of the process; returns when the command socket closes or a Stop arrives.

    ``command_socket``: connected to the agent, see :mod:`~deadpool_ext.replication.commands`; no other process may
    hold the agent's end, or its death goes unnoticed. ``listener``: a listening socket (:func:`tcp.listen`) that its
    owner keeps open, so that a successor of this process is reached at the same address, and connections made in
    between wait for it. ``secret``: shared by all replicators of the job. Call it after a fork, outside any event
    loop. Raises what a bug raises: the process dies, and the agent sees the socket close.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the agent decides when to end
    asyncio.run(_main(command_socket, listener, secret, node))


async def _main(command_socket: socket.socket, listener: socket.socket, secret: bytes, node: str) -> None:
    reader, writer = await asyncio.open_connection(sock=command_socket)
    replicator = Replicator(writer, listener, secret, node)
    try:
        await replicator.run(reader)
    finally:
        writer.close()


class Replicator:
    """The process's state: which generation it is in, and the listening socket."""

    def __init__(self, writer: asyncio.StreamWriter, listener: socket.socket, secret: bytes, node: str) -> None:
        self._writer = writer
        self._server = listener
        self._secret = secret
        self._node = node
        self._floor = 0  # the newest generation heard of from the agent: older ones have no effect
        self._generation: Generation | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._fired_faults: dict[int, asyncio.Event] = {}  # by id: set when the stream that stands there may go on
        self._crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the agent's end closes, a Stop, or a bug."""
        loop = asyncio.get_running_loop()
        work = {loop.create_task(self._obey(reader)), loop.create_task(self._accept())}
        try:
            done, _ = await asyncio.wait({*work, self._crash}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            for task in (*work, *self._connections):
                task.cancel()
            await asyncio.gather(*work, *self._connections, return_exceptions=True)
            await self._leave()
            self._server.close()
            self._crash.cancel()

    # ---- commands --------------------------------------------------------------------------------------------------

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = await commands.read_message(reader)
            if message is None or isinstance(message, Stop):
                return
            match message:
                case AddFault():
                    if self._generation is not None:
                        self._generation.faults.append(message.fault)
                case FaultOver():
                    self._fired_faults.setdefault(message.fault_id, asyncio.Event()).set()
                case Configure() | Freeze() | Fetch() | DropConnections():
                    await self._carry_out(message)
                case _:
                    raise ProtocolError(f"the agent sent {type(message).__name__}")

    async def _carry_out(self, command: Command) -> None:
        match command:
            case Configure():
                await self._configure(command)
            case Freeze(generation=generation):
                await self._freeze(generation)
            case Fetch():
                self._fetch(command)
            case DropConnections(generation=number):
                if self._generation is not None and self._generation.number == number:
                    self._generation.drop_connections()

    async def _configure(self, command: Configure) -> None:
        if command.generation < self._floor:
            return  # INV-4
        self._floor = command.generation
        await self._leave()
        try:
            generation = Generation(
                command,
                node=self._node,
                secret=self._secret,
                fired_faults=self._fired_faults,
                say=self._say,
                crashed=self._crashed,
            )
        except (OSError, DeadpoolError) as error:
            self._say(Problem(kind="configure", text=str(error), generation=command.generation))
            return
        self._generation = generation
        self._say(Configured(generation=generation.number))
        generation.repeat_commit()
        generation.spawn(generation.watch(), "watch")
        for rank, targets in command.targets.items():
            for target in targets:
                generation.spawn(outgoing.stream_rank(generation, rank, target), f"stream {rank} to {target.node}")
        for peer in generation.peers:
            generation.spawn(outgoing.tell_done(generation, peer), f"done to {peer.node}")

    async def _freeze(self, number: int) -> None:
        entered = self._generation is not None and self._generation.number >= number
        if number < self._floor or entered:
            return  # INV-4
        self._floor = number
        await self._leave()
        self._say(Frozen(generation=number))

    def _fetch(self, command: Fetch) -> None:
        generation = self._generation
        if generation is not None and generation.number == command.generation:
            generation.spawn(outgoing.fetch(generation, command), f"fetch {command.rank}")
        elif command.generation >= self._floor:
            self._say(
                FetchFailed(
                    generation=command.generation,
                    rank=command.rank,
                    version=command.version,
                    reason="not configured for this generation",
                    corrupt=False,
                )
            )

    async def _leave(self) -> None:
        """End the current generation. Nobody is admitted to it from here on."""
        generation, self._generation = self._generation, None
        if generation is not None:
            await generation.close()

    # ---- connections -----------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._server)
            except OSError as error:
                self._say(Problem(kind="refused", text=f"accept failed: {error}", generation=self._floor))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._connections) >= _MAX_CONNECTIONS:
                sock.close()
                continue
            task = loop.create_task(self._serve(sock, str(address[0])), name=f"serve {address[0]}:{address[1]}")
            self._connections.add(task)
            task.add_done_callback(self._served)

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        admitted: Generation | None = None
        channel = Channel(sock, tcp.HANDSHAKE_S)

        def admit(hello: Hello) -> Verdict:
            nonlocal admitted
            verdict = self._decide(hello)
            task = asyncio.current_task()
            if verdict.answer is Answered.OK and self._generation is not None and task is not None:
                admitted = self._generation
                admitted.adopt(task)
                admitted.track(channel)
            return verdict

        try:
            hello, _ = await tcp.welcome(channel, self._secret, admit)
            peer = hello.node
            if admitted is not None:
                channel.allow(admitted.configure.no_progress_s)
                await incoming.serve(admitted, channel, hello)
        except AuthenticationError as error:
            self._unproven(peer, error)
        except CONNECTION_FAILURES as error:
            if admitted is not None:
                admitted.report(error, peer=peer)
        finally:
            if admitted is not None:
                admitted.release(channel)
            else:
                channel.close()

    def _decide(self, hello: Hello) -> Verdict:
        if hello.to != self._node:
            answer = Answered.REFUSED
        elif hello.generation < self._floor:
            answer = Answered.STALE
        elif self._generation is None or self._generation.number != hello.generation:
            answer = Answered.NOT_READY
        else:
            answer = Answered.OK
        return Verdict(answer=answer, generation=self._floor)

    def _unproven(self, peer: str, error: AuthenticationError) -> None:
        if self._generation is not None:
            self._generation.problem("authentication", str(error), peer=peer)

    # ---- outcomes --------------------------------------------------------------------------------------------------

    def _served(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._crashed(error)

    def _crashed(self, error: BaseException) -> None:
        if not self._crash.done():
            self._crash.set_exception(error)

    def _say(self, reply: Reply) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(commands.encode(reply))
        if self._writer.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self._crashed(ProtocolError("the agent does not take replies"))
