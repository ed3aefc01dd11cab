"""The agent's handle on its replicator process: commands out, replies in as events of the agent machine.

The agent owns the socket that other nodes connect to and hands it to each replicator, one after the other: the node's
address outlives them, and connections made while there is none wait in the socket's queue.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from deadpool_ext.control.agent_events import (
    Event,
    FetchSeat,
    ReplicatorFrozen,
    SeatFetched,
    SeatFetchFailed,
    ToCoordinator,
    VersionCommitted,
)
from deadpool_ext.control.forkserver import ForkServer
from deadpool_ext.control.node_memory import NodeMemory
from deadpool_ext.control.processes import send_signal
from deadpool_ext.protocol.messages import Emit, FaultReached, JobSpec, Replicate
from deadpool_ext.protocol.types import DeadpoolError
from deadpool_ext.replication import commands
from deadpool_ext.replication.errors import ProtocolError
from deadpool_ext.replication.transport import tcp

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16
_LAST_READS: Final = 8  # more than a socket's buffer holds
_CORRUPT: Final = frozenset({"corrupt_slot", "corrupt_transfer"})


Item = Event | ToCoordinator


class ReplicatorError(DeadpoolError):
    """The replicator is gone, or of no use any more."""


class ReplicatorLink:
    """Used on the event loop's thread only. One replicator at a time: :meth:`start`, then :meth:`ended`."""

    def __init__(self, node: str, host: str) -> None:
        """Listens on a free port of ``host``. Make it after the fork server, which must not inherit the listener."""
        self.pid = 0  # 0: there is none, or the fork server has not told it yet
        self._node = node
        self._host = host
        self._listener = tcp.listen(host)
        self._sock: socket.socket | None = None
        self._doomed = False
        self._tokens = (f"{node}-replicator{number}" for number in itertools.count())
        self._token = ""
        self._buffer = bytearray()
        self._sources: dict[tuple[int, int], str] = {}  # (generation, rank) -> node it is fetched from
        self._fired_faults: set[int] = set()  # a successor must not stop at them again

    @property
    def address(self) -> tuple[str, int]:
        """Where other replicators reach this node's, whichever process it is."""
        return self._host, int(self._listener.getsockname()[1])

    def start(self, fork_server: ForkServer, take: Callable[[Item], None]) -> None:
        """Have a replicator forked; commands may be given at once. ``take`` gets what it says. Raises
        ForkServerError."""
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        self._sock, self._token, self._doomed = mine, next(self._tokens), False
        with theirs:
            fork_server.fork_replicator(self._token, theirs, self._listener)
        asyncio.get_running_loop().add_reader(mine.fileno(), self._readable, take)

    def forked(self, token: str, pid: int) -> bool:
        """The fork server made a process; False if it is not the replicator."""
        if token != self._token:
            return False
        self.pid = pid
        if self._doomed:
            send_signal(pid, signal.SIGKILL)
        return True

    def ended(self, take: Callable[[Item], None]) -> None:
        """Its process was reaped: take what it said before its end, and let go of the socket."""
        try:
            for _ in range(_LAST_READS):
                for item in self._events():
                    take(item)
        except ReplicatorError:
            pass  # the end of the stream
        self._drop()

    def close(self) -> None:
        """Close the sockets; the replicator ends."""
        self._drop()
        self._listener.close()

    def _drop(self) -> None:
        self.pid = 0
        self._buffer.clear()
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _readable(self, take: Callable[[Item], None]) -> None:
        try:
            for item in self._events():
                take(item)
        except ReplicatorError as error:
            self._give_up(error)

    def _give_up(self, error: ReplicatorError) -> None:
        """It has closed its socket, or makes no sense: what counts is the end of its process, which follows."""
        print(f"deadpool: node {self._node}: {error}", file=sys.stderr, flush=True)
        self._doomed = True
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
        if self.pid:
            send_signal(self.pid, signal.SIGKILL)

    def _events(self) -> Iterator[Item]:
        if self._sock is None:
            return
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ReplicatorError(f"the replicator is gone: {error}") from error
        if not data:
            raise ReplicatorError("the replicator ended")
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                reply = commands.decode(body)
            except ProtocolError as error:
                raise ReplicatorError(str(error)) from error
            if (event := self._translate(reply)) is not None:
                yield event

    def configure(self, replicate: Replicate, memory: NodeMemory, job: JobSpec | None) -> None:
        """Replicate by this map between this node's segments and the other nodes."""
        addresses = {address.node: address for address in replicate.addresses}
        targets = {
            rank: tuple(
                addresses[node]
                for node in dict.fromkeys(replicate.seat_nodes[peer] for peer in replicate.replica_of[rank])
            )
            for rank in memory.own
        }
        present = {*memory.own, *memory.hosted}
        faults = job.faults if job is not None else ()
        self._send(
            commands.Configure(
                generation=replicate.generation,
                specs=tuple(spec for spec in replicate.specs if spec.rank in present),
                own={rank: segment.path for rank, segment in memory.own.items()},
                hosted={rank: segment.path for rank, segment in memory.hosted.items()},
                targets=targets,
                members=replicate.addresses,
                board_path=memory.board.path,
                faults=tuple(fault for fault in faults if fault.get("id") not in self._fired_faults),
            )
        )

    def freeze(self, generation: int) -> None:
        """Let go of all slots; ReplicatorFrozen follows."""
        self._sources.clear()
        self._send(commands.Freeze(generation=generation))

    def fetch(self, seat: FetchSeat, memory: NodeMemory) -> None:
        """Bring a seat's state into its own segment."""
        self._sources[seat.generation, seat.rank] = seat.source.node
        self._send(
            commands.Fetch(
                generation=seat.generation,
                rank=seat.rank,
                version=seat.version,
                source=seat.source,
                segment_path=memory.own[seat.rank].path,
            )
        )

    def add_fault(self, fault: dict[str, Any]) -> None:
        """Its streams watch for one more fault; a successor learns of it when it is configured."""
        self._send(commands.AddFault(fault=fault))

    def release_fault(self, fault_id: int) -> None:
        """A stream that stands at this fault goes on."""
        self._send(commands.FaultOver(fault_id=fault_id))

    def _send(self, command: commands.Command) -> None:
        if self._sock is None:
            return  # it is dead, and a successor gets the orders that are still in force
        frame = commands.encode(command)
        try:
            sent = self._sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # its end is reported by events()
        # Commands are few and small against the socket's buffer: one that does not fit means it stopped reading.
        if sent != len(frame):
            self._give_up(ReplicatorError("the replicator does not read its commands"))

    def _translate(self, reply: commands.Message) -> Event | ToCoordinator | None:
        match reply:
            case commands.Frozen():
                return ReplicatorFrozen(generation=reply.generation)
            case commands.FetchDone():
                return SeatFetched(
                    generation=reply.generation, rank=reply.rank, nbytes=reply.nbytes, seconds=reply.seconds
                )
            case commands.FetchFailed():
                return SeatFetchFailed(
                    generation=reply.generation,
                    rank=reply.rank,
                    source_node=self._sources.get((reply.generation, reply.rank), ""),
                    detail=reply.reason,
                    corrupt=reply.corrupt,
                )
            case commands.CommittedSeen():
                return VersionCommitted(generation=reply.generation, version=reply.version)
            case commands.ReplicaSealed():
                return self._emit(
                    "replica_sealed",
                    reply.generation,
                    reply.rank,
                    version=reply.version.v,
                    lineage=reply.version.lineage,
                    target=reply.target,
                    bytes=reply.nbytes,
                    seconds=reply.seconds,
                )
            case commands.FaultPointReached():
                self._fired_faults.add(reply.fault_id)
                return ToCoordinator(message=FaultReached(fault_id=reply.fault_id, node=self._node, rank=reply.rank))
            case commands.Problem():
                name = "corruption_detected" if reply.kind in _CORRUPT else "warning"
                fields: dict[str, Any] = {"kind": reply.kind, "reason": reply.text, "peer": reply.peer}
                if reply.version is not None:
                    fields |= {"version": reply.version.v, "lineage": reply.version.lineage}
                return self._emit(name, reply.generation, reply.rank, **fields)
        return None

    def _emit(self, event: str, generation: int, rank: int | None, **fields: Any) -> ToCoordinator:
        return ToCoordinator(
            message=Emit(event=event, generation=generation, node=self._node, rank=rank, fields=fields)
        )
