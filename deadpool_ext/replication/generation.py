"""What a replicator holds and does in one generation: segments, agreement, tasks. Gone as a whole with its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from deadpool_ext.protocol.messages import NodeAddress
from deadpool_ext.protocol.types import InvariantError, Version, invariant
from deadpool_ext.replication import agreement as agreeing
from deadpool_ext.replication.agreement import Agreement
from deadpool_ext.replication.arena import SLOTS, SealedSlot, Segment, SlotState
from deadpool_ext.replication.board import Board
from deadpool_ext.replication.commands import CommittedSeen, Configure, Problem, Reply
from deadpool_ext.replication.errors import (
    AuthenticationError,
    CorruptTransferError,
    NoProgressError,
    NotReadyError,
    ProtocolError,
    SegmentFormatError,
    SlotStateError,
    StaleGenerationError,
    TransferError,
)
from deadpool_ext.replication.transport import handshake, tcp
from deadpool_ext.replication.transport.tcp import Channel

# What a connection may end with without anything being wrong with this process.
CONNECTION_FAILURES = (OSError, ProtocolError, TransferError, SlotStateError)

_BUSY_POLL_S = 0.001
_IDLE_POLL_S = 0.005
_BUSY_AFTER_CHANGE_S = 0.25
_MAX_PROBLEMS = 200  # distinct ones said in a generation


class Signal:
    """Wakes whoever waits at this moment. Check the condition, then call wait, with nothing awaited in between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake all waiters."""
        self._event.set()
        self._event = asyncio.Event()

    def wait(self) -> Coroutine[Any, Any, Literal[True]]:
        """To be awaited: ends at the next :meth:`fire` after this *call*, even if a task begins to await it later."""
        return self._event.wait()


class Backoff:
    """Growing pauses between attempts, 5 ms to 250 ms: peers enter a generation within moments of each other."""

    def __init__(self) -> None:
        self._next_s = 0.005

    async def pause(self) -> None:
        """Wait before the next attempt."""
        await asyncio.sleep(self._next_s)
        self._next_s = min(self._next_s * 2, 0.25)

    def reset(self) -> None:
        """An attempt succeeded."""
        self._next_s = 0.005


class Generation:
    """Everything of one generation on one node. Lives in the replicator's event loop."""

    def __init__(
        self,
        configure: Configure,
        *,
        node: str,
        secret: bytes,
        fired_faults: dict[int, asyncio.Event],
        say: Callable[[Reply], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        """Opens the segments and voids what is above the target. Raises ``OSError`` or a ``DeadpoolError`` if
        something does not fit; nothing stays open then."""
        self.number = configure.generation
        self.configure = configure
        self.node = node
        self.secret = secret
        self.fired_faults = fired_faults
        self.faults = list(configure.faults)
        self.say = say
        self._crashed = crashed
        self.peers = tuple(member for member in configure.members if member.node != node)
        invariant(configure.targets.keys() <= configure.own.keys(), "a rank with targets has no segment here")
        self.agreement = Agreement(
            node=node,
            generation=self.number,
            members=[member.node for member in configure.members],
            targets={rank: [peer.node for peer in configure.targets.get(rank, ())] for rank in configure.own},
        )
        self.own: dict[int, Segment] = {}
        self.hosted: dict[int, Segment] = {}
        self.board = Board.open(configure.board_path)
        try:
            self._open_segments()
        except BaseException:
            self._close_memory()
            raise
        self.sealed = {rank: Signal() for rank in self.own}
        self.done_due = {peer.node: Signal() for peer in self.peers}
        self.done_to_send: dict[str, Version] = {}
        self.fetching: set[int] = set()
        self._receivers: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[Channel] = set()
        self._problems: set[tuple[str, str, str | None]] = set()

    # ---- life ------------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run ``work`` as a task of this generation; an exception from it is a bug and ends the process."""
        self.adopt(asyncio.get_running_loop().create_task(work, name=name))

    def adopt(self, task: asyncio.Task[None]) -> None:
        """Let ``task`` end with this generation."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """End every task and connection, give back half-written slots, unmap. Nothing is written afterwards."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # what they raised is in _ended's hands
        for segment in self.hosted.values():
            segment.reset_writing()
        self._close_memory()

    def drop_connections(self) -> None:
        """Break every open connection; both ends come back by themselves."""
        for channel in tuple(self._channels):
            channel.break_off()

    # ---- connections -----------------------------------------------------------------------------------------------

    async def connect(self, peer: NodeAddress, purpose: handshake.Purpose, rank: int = -1) -> Channel:
        """A proven connection of this generation; give it to :meth:`release`. Raises CONNECTION_FAILURES."""
        greeting = handshake.hello(purpose=purpose, generation=self.number, node=self.node, to=peer.node, rank=rank)
        channel = await tcp.connect(peer, greeting, self.secret, self.configure.no_progress_s)
        self._channels.add(channel)
        return channel

    def track(self, channel: Channel) -> None:
        """Make an accepted connection one of this generation's."""
        self._channels.add(channel)

    def release(self, channel: Channel) -> None:
        """Close a connection."""
        self._channels.discard(channel)
        channel.close()

    async def take_over(self, rank: int) -> None:
        """The calling task is the one that receives replicas of ``rank`` from now on. A predecessor whose connection
        broke without this side noticing is ended first, so that a slot has one writer."""
        current = asyncio.current_task()
        if current is None:
            raise InvariantError("take_over is called from a task")
        predecessor = self._receivers.get(rank)
        self._receivers[rank] = current
        if predecessor is not None and not predecessor.done():
            predecessor.cancel()
            await asyncio.wait([predecessor])

    # ---- what happened ---------------------------------------------------------------------------------------------

    def apply(self, event: agreeing.Event) -> None:
        """Let the agreement take an event in, and carry out what follows."""
        try:
            effects = self.agreement.handle(event)
        except InvariantError as error:
            self.problem("agreement", str(error))
            return
        for effect in effects:
            match effect:
                case agreeing.SendDone(to=peer, version=version):
                    self.done_to_send[peer] = version
                    self.done_due[peer].fire()
                case agreeing.Commit(version=version):
                    if self.board.commit(self.number, version):
                        self.say(CommittedSeen(generation=self.number, version=version))

    def repeat_commit(self) -> None:
        """Say again what was committed in this generation already: a process that died may have taken the word of it
        along."""
        commit = self.board.committed()
        if commit is not None and commit.generation == self.number:
            self.say(CommittedSeen(generation=self.number, version=commit.version))

    def newest(self, rank: int, sent: SealedSlot | None) -> SealedSlot | None:
        """The own slot that a target needs which acknowledged ``sent`` last; None if it has it."""
        slot = self.own[rank].newest()
        if slot is None or sent is None or slot.version > sent.version:
            return slot
        resealed = slot.version == sent.version and (slot.shard_crc, slot.meta_crc) != (sent.shard_crc, sent.meta_crc)
        return slot if resealed else None

    async def watch(self) -> None:
        """Notice what the workers seal. Polls one word a segment; see also ``_BUSY_POLL_S``."""
        loop = asyncio.get_running_loop()
        seen: dict[int, int] = {}
        busy_until_s = 0.0
        writing = False
        while True:
            for rank, segment in self.own.items():
                changes = segment.changes()
                if seen.get(rank) == changes:
                    continue
                seen[rank] = changes
                busy_until_s = loop.time() + _BUSY_AFTER_CHANGE_S
                slot = segment.newest()
                if slot is not None:
                    self.apply(agreeing.OwnSealed(rank=rank, version=slot.version))
                    self.sealed[rank].fire()
                writing = any(
                    other.state(index) is SlotState.WRITING for other in self.own.values() for index in range(SLOTS)
                )
            busy = writing or loop.time() < busy_until_s
            await asyncio.sleep(_BUSY_POLL_S if busy else _IDLE_POLL_S)

    def problem(
        self, kind: str, text: str, *, rank: int | None = None, version: Version | None = None, peer: str | None = None
    ) -> None:
        """Say it to the agent, once."""
        key = (kind, text, peer)
        if key in self._problems or len(self._problems) >= _MAX_PROBLEMS:
            return
        self._problems.add(key)
        self.say(Problem(kind=kind, text=text, generation=self.number, rank=rank, version=version, peer=peer))

    def report(self, error: Exception, *, peer: str, rank: int | None = None, version: Version | None = None) -> None:
        """Say what ended a connection, if it is something an operator should know: a broken one is not."""
        match error:
            case NotReadyError():
                return
            case StaleGenerationError():
                kind = "stale"
            case NoProgressError():
                kind = "no_progress"
            case AuthenticationError():
                kind = "authentication"
            case CorruptTransferError():
                kind = "corrupt_transfer"
            case ProtocolError():
                kind = "refused"
            case SlotStateError():
                kind = "slot"
            case _:
                return
        self.problem(kind, str(error), rank=rank, version=version, peer=peer)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _open_segments(self) -> None:
        specs = {spec.rank: spec for spec in self.configure.specs}
        for paths, segments in ((self.configure.own, self.own), (self.configure.hosted, self.hosted)):
            for rank, path in paths.items():
                segment = Segment.open(path)
                segments[rank] = segment
                if segment.spec != specs.get(rank):
                    raise SegmentFormatError(f"{path} is {segment.spec}, expected {specs.get(rank)}")
        for segment in self.hosted.values():
            segment.reset_writing()
        if self.configure.void_above is not None:
            for segment in (*self.own.values(), *self.hosted.values()):
                segment.void_above(self.configure.void_above)

    def _close_memory(self) -> None:
        for segment in (*self.own.values(), *self.hosted.values()):
            segment.close()
        self.board.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._crashed(error)
