"""The agent's handle on its replicator process: commands out, replies in as events of the agent machine."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import traceback
from collections.abc import Iterator
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
from deadpool_ext.control.processes import die_with_parent, name_process, reset_signals
from deadpool_ext.protocol.messages import Emit, FaultReached, JobSpec, Replicate
from deadpool_ext.protocol.types import DeadpoolError
from deadpool_ext.replication import commands
from deadpool_ext.replication.errors import ProtocolError
from deadpool_ext.replication.replicator import run_replicator

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16
_CORRUPT: Final = frozenset({"corrupt_slot", "corrupt_transfer"})


class ReplicatorError(DeadpoolError):
    """The replicator is gone."""


class ReplicatorLink:
    """Started before the event loop; used on the event loop's thread only."""

    def __init__(self, pid: int, sock: socket.socket, node: str, host: str) -> None:
        self.pid: Final = pid
        self._sock = sock
        self._node = node
        self._host = host
        self._buffer = bytearray()
        self._sources: dict[tuple[int, int], str] = {}  # (generation, rank) -> node it is fetched from
        self._port: asyncio.Future[int] | None = None
        self._early_port: int | None = None

    @classmethod
    def start(cls, host: str, secret: bytes, node: str, *, close: ForkServer) -> ReplicatorLink:
        """Fork the replicator, listening on ``host``. ``close``: inherited by the fork, and not for it."""
        mine, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                mine.close()
                close.close()
                die_with_parent(parent)
                reset_signals()
                name_process(f"dp-repl {node}")
                run_replicator(theirs, host, secret, node)
                status = 0
            except BaseException:  # nothing may return into the agent's stack
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()
        mine.setblocking(False)
        return cls(pid, mine, node, host)

    def fileno(self) -> int:
        """Descriptor that is readable when :meth:`events` has something."""
        return self._sock.fileno()

    async def listening(self) -> tuple[str, int]:
        """Where other replicators reach this one, once it listens."""
        if self._early_port is not None:
            return self._host, self._early_port
        self._port = asyncio.get_running_loop().create_future()
        return self._host, await self._port

    def events(self) -> Iterator[Event | ToCoordinator]:
        """What arrived, without blocking. Raises :class:`ReplicatorError` at its end."""
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
        self._send(
            commands.Configure(
                generation=replicate.generation,
                specs=tuple(spec for spec in replicate.specs if spec.rank in present),
                own={rank: segment.path for rank, segment in memory.own.items()},
                hosted={rank: segment.path for rank, segment in memory.hosted.items()},
                targets=targets,
                members=replicate.addresses,
                board_path=memory.board.path,
                faults=job.faults if job is not None else (),
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

    def release_fault(self, fault_id: int) -> None:
        """A stream that stands at this fault goes on."""
        self._send(commands.FaultOver(fault_id=fault_id))

    def close(self) -> None:
        """Close the socket; the replicator ends."""
        self._sock.close()

    def _send(self, command: commands.Command) -> None:
        frame = commands.encode(command)
        try:
            sent = self._sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # its end is reported by events()
        # Commands are few and small against the socket's buffer: one that does not fit means it stopped reading.
        if sent != len(frame):
            raise ReplicatorError("the replicator does not read its commands")

    def _translate(self, reply: commands.Message) -> Event | ToCoordinator | None:
        match reply:
            case commands.Listening():
                self._early_port = reply.port
                if self._port is not None and not self._port.done():
                    self._port.set_result(reply.port)
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
                    detail=f"{'corrupt: ' if reply.corrupt else ''}{reply.reason}",
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
                return ToCoordinator(message=FaultReached(fault_id=reply.fault_id, node=self._node, rank=reply.rank))
            case commands.Problem():
                name = "corruption_detected" if reply.kind in _CORRUPT else "warning"
                return self._emit(
                    name, reply.generation, reply.rank, kind=reply.kind, reason=reply.text, peer=reply.peer
                )
        return None

    def _emit(self, event: str, generation: int, rank: int | None, **fields: Any) -> ToCoordinator:
        return ToCoordinator(
            message=Emit(event=event, generation=generation, node=self._node, rank=rank, fields=fields)
        )
