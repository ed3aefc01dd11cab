"""Replicator processes on this machine, with the test as everybody's agent and worker."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from deadpool_ext import _native
from deadpool_ext.protocol.messages import NodeAddress
from deadpool_ext.protocol.types import ShardSpec, Version
from deadpool_ext.replication import commands
from deadpool_ext.replication.arena import SealedSlot, Segment
from deadpool_ext.replication.board import Board
from deadpool_ext.replication.replicator import run_replicator
from deadpool_ext.replication.transport import tcp

DEADLINE_S = 30.0
SECRET = b"only for this test"
SHARD_BYTES = 9 * 2**20 + 777  # three chunks


def spec_of(rank: int, shard_bytes: int = SHARD_BYTES) -> ShardSpec:
    return ShardSpec(rank=rank, shard_bytes=shard_bytes, meta_capacity=4096, layout_digest=f"layout{rank}")


def content(rank: int, version: Version, nbytes: int) -> bytes:
    """Differs in every 16 bytes and for every rank and version."""
    seed = struct.pack("<III", rank, version.v, version.lineage)
    block = b"".join(seed + struct.pack("<I", i) for i in range(4096))
    return (block * (nbytes // len(block) + 1))[:nbytes]


def seal(segment: Segment, version: Version) -> SealedSlot:
    """What a worker does."""
    data = content(segment.rank, version, segment.spec.shard_bytes)
    index = segment.begin(version)
    segment.writable(index).shard[:] = data
    return segment.seal(index, b"meta of %d" % version.v, _native.crc32c(data))


def is_right(segment: Segment, version: Version) -> bool:
    """Whether the segment holds exactly what a worker sealed as this version."""
    views = segment.read(version)
    expected = content(segment.rank, version, segment.spec.shard_bytes)
    return bytes(views.shard) == expected and bytes(views.meta) == b"meta of %d" % version.v


class Node:
    """One replicator process, the agent's end of its socket, and the node's memory."""

    def __init__(self, name: str, others: list[Node], secret: bytes = SECRET) -> None:
        self.name = name
        self.board = Board.create()
        self.own: dict[int, Segment] = {}
        self.hosted: dict[int, Segment] = {}
        self.said: list[commands.Reply] = []
        self._taken: dict[type, int] = {}
        self._others = others
        self._secret = secret
        self._listener = tcp.listen("127.0.0.1")
        self.address = NodeAddress(node=name, host="127.0.0.1", port=self._listener.getsockname()[1])
        self.start()

    def start(self) -> None:
        """Fork a replicator: the first one, or the successor of one that ended."""
        self._buffer = b""
        self._socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                # Only the agent may hold its end, or its death would go unnoticed.
                for end in (self._socket, *(other._socket for other in self._others if other is not self)):
                    end.close()
                run_replicator(theirs, self._listener, self._secret, self.name)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self.exit_status: int | None = None

    def restart(self) -> None:
        """What an agent does: the dead one is reaped, half-written replicas are given back, the next one starts."""
        self.kill()
        self._socket.close()
        for segment in self.hosted.values():
            segment.reset_writing()
        self.start()

    def send(self, command: commands.Command) -> None:
        self._socket.sendall(commands.encode(command))

    def expect[T](self, kind: type[T], where: Callable[[T], bool] = lambda _: True) -> T:
        """The next reply of this kind that fits; those of this kind before it are passed over for good."""
        deadline = time.monotonic() + DEADLINE_S
        at = self._taken.get(kind, 0)
        while True:
            for index in range(at, len(self.said)):
                reply = self.said[index]
                if isinstance(reply, kind) and where(reply):
                    self._taken[kind] = index + 1
                    return reply
            at = len(self.said)
            if not self._read(deadline):
                raise AssertionError(f"{self.name}: no such {kind.__name__} in {self.said}")

    def seen[T](self, kind: type[T]) -> list[T]:
        """All replies of this kind so far."""
        while self._read(time.monotonic()):
            pass
        return [reply for reply in self.said if isinstance(reply, kind)]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Exit code of the process; minus the signal."""
        if self.exit_status is None:
            with selectors.DefaultSelector() as selector:
                pidfd = os.pidfd_open(self.pid)
                selector.register(pidfd, selectors.EVENT_READ)
                ended = selector.select(DEADLINE_S)
                os.close(pidfd)
            assert ended, f"{self.name} does not exit"
            self.exit_status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.exit_status

    def hang_up(self) -> int:
        """Close the agent's end; the process must end by itself."""
        self._socket.close()
        return self.wait()

    def close(self) -> None:
        self._socket.close()
        self._listener.close()
        if self.exit_status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        for segment in (*self.own.values(), *self.hosted.values()):
            segment.close()
        self.board.close()

    def _read(self, deadline: float) -> bool:
        """Take in what comes until the deadline; False if nothing did."""
        self._socket.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            data = self._socket.recv(65536)
        except (TimeoutError, BlockingIOError):
            return False
        finally:
            self._socket.settimeout(None)
        if not data:
            return False
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = struct.unpack("<I", self._buffer[:4])
            if len(self._buffer) < 4 + length:
                break
            message = commands.decode(self._buffer[4 : 4 + length])
            self._buffer = self._buffer[4 + length :]
            self.said.append(message)  # type: ignore[arg-type]
        return True


class Cluster:
    """A ring: seat i is filled by ``seats[i]`` and its replica hosted by the node of seat i + 1."""

    def __init__(self, seats: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.shard_bytes = shard_bytes
        self.nodes: list[Node] = []
        self.seats: list[Node] = []
        self.instead: dict[tuple[str, str], NodeAddress] = {}  # (from, to) -> a proxy's address
        for index in range(seats):
            self.seats.append(self.add(f"n{index}"))

    def add(self, name: str, secret: bytes = SECRET) -> Node:
        node = Node(name, self.nodes, secret)
        self.nodes.append(node)
        return node

    def configure(self, generation: int, void_above: Version | None = None, only: list[Node] | None = None,
                  **fields: object) -> None:  # fmt: skip
        """What agents do at Replicate or Recover: make missing segments, tell the replicators."""
        for rank, node in enumerate(self.seats):
            if only is not None and node not in only:
                continue
            hosted_rank = (rank - 1) % len(self.seats)
            target = self.seats[(rank + 1) % len(self.seats)]
            for segments, which in ((node.own, rank), (node.hosted, hosted_rank)):
                if which not in segments:
                    segments[which] = Segment.create(spec_of(which, self.shard_bytes))
            command = commands.Configure(
                generation=generation,
                specs=(spec_of(rank, self.shard_bytes), spec_of(hosted_rank, self.shard_bytes)),
                own={rank: node.own[rank].path},
                hosted={hosted_rank: node.hosted[hosted_rank].path},
                targets={rank: (self.instead.get((node.name, target.name), target.address),)},
                members=tuple(member.address for member in self.seats),
                board_path=node.board.path,
                void_above=void_above,
            )
            node.send(dataclasses.replace(command, **fields))  # type: ignore[arg-type]
        for node in self.seats if only is None else only:
            node.expect(commands.Configured, lambda reply: reply.generation == generation)

    def seal_all(self, version: Version) -> None:
        for rank, node in enumerate(self.seats):
            seal(node.own[rank], version)

    def expect_commit(self, generation: int, version: Version) -> None:
        for node in self.seats:
            node.expect(commands.CommittedSeen, lambda said: said.generation == generation and said.version == version)
            commit = node.board.committed()
            assert commit is not None and commit.generation == generation and commit.version == version

    def fence(self, generation: int, nodes: list[Node]) -> None:
        for node in nodes:
            node.board.fence(generation)
            node.send(commands.Freeze(generation=generation))
        for node in nodes:
            node.expect(commands.Frozen, lambda said: said.generation == generation)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextlib.contextmanager
def cluster(seats: int, shard_bytes: int = SHARD_BYTES) -> Iterator[Cluster]:
    made = Cluster(seats, shard_bytes)
    try:
        yield made
    finally:
        made.close()


Tamper = Callable[[int, int, bytearray], None]


def _leave(number: int, offset: int, data: bytearray) -> None:
    """Change nothing."""


class Proxy:
    """A TCP proxy that hands on the bytes of every connection, through ``tamper`` on the way to the server.

    ``back``: on the way from the server instead.

    ``tamper(connection number, offset of the first byte, bytes)`` changes the bytes in place. ``silent`` set: bytes
    are taken no more (the connections stay open)."""

    def __init__(self, to: NodeAddress, tamper: Tamper = _leave, back: bool = False) -> None:
        self._to = to
        self._there, self._back = (_leave, tamper) if back else (tamper, _leave)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = NodeAddress(node=to.node, host="127.0.0.1", port=self._server.getsockname()[1])
        self._sockets: list[socket.socket] = [self._server]
        self._threads: list[threading.Thread] = []
        self.silent = threading.Event()
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection((self._to.host, self._to.port))
                self._sockets += [client, server]
                self._start(self._pump, client, server, number, self._there)
                self._start(self._pump, server, client, number, self._back)
                number += 1

    def _pump(self, source: socket.socket, sink: socket.socket, number: int, tamper: Tamper) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 18)):
                if self.silent.is_set():
                    return
                tamper(number, offset, data)
                offset += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        for end in self._sockets:
            end.close()


@contextlib.contextmanager
def proxy(to: NodeAddress, tamper: Tamper = _leave, back: bool = False) -> Iterator[Proxy]:
    made = Proxy(to, tamper, back)
    try:
        yield made
    finally:
        made.close()
