"""All replaceable groups of one worker process, and what happens to them together."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from deadpool_ext import _shell
from deadpool_ext.comm import nccl
from deadpool_ext.comm.background import Cancellation
from deadpool_ext.comm.connection import Communicator, Connection
from deadpool_ext.comm.errors import CommunicatorError, FencedError
from deadpool_ext.comm.group import BackendRequest, GroupSpec, parse_backend
from deadpool_ext.comm.pulse import Pulse

_MAX_RETIRING = 512  # old communicators not destroyed yet; more means that something keeps them
_RETIRE_PATIENCE_S = 5.0
_ERRORS = {1: "timeout", 2: "communication error", 3: "remote error"}  # c10d's ErrorType
_GRACE_S = 10.0  # by which a connecting thread may outlive its deadline before it is abandoned


class Mode(enum.StrEnum):
    """What a group made now would get."""

    IDLE = "idle"  # nothing yet: groups cannot be made
    SOLO = "solo"  # an answer without peers
    CONNECTED = "connected"  # the peers of the current generation


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    """What one group has done in its current generation; ``waiting`` is the number of blocked threads."""

    name: str
    ranks: tuple[int, ...]
    generation: int
    issued: int
    completed: int
    waiting: int
    collectives: int  # of those issued: operations that every member issues
    last_op: str
    fenced: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortReport:
    """What an abort did. Not ``complete``: something of the old generation may still write into tensors."""

    seconds: float
    sockets: int
    complete: bool
    detail: str
    lost: int = 0  # operations that gloo lost; their waiters were woken with an error, nothing of theirs runs


@dataclass(kw_only=True, slots=True)
class _Group:
    spec: GroupSpec
    shell: _shell.ShellBackend
    place: int | None = None  # in the pulse


class Communicators:
    """The registry of one worker's groups. Make one per process; ``patch_torch`` puts it to use.

    Groups are made by the trainer's thread. ``fence`` and ``abort``, ``open_store``, ``counts`` and the totals may be
    called from any thread at any time; ``solo`` and ``connect`` only by the thread that makes groups.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        connect_timeout_s: float = 60.0,
        accelerator: bool | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """``connect_timeout_s`` bounds the making of each single group. ``accelerator``: whether ``nccl`` means NCCL
        (default: whether the driver shows a GPU); without one everything is gloo. ``pulse``: where operations are
        shown to whoever looks from outside; it must stay open for the life of the process."""
        self.rank = rank
        self.world_size = world_size
        self.connect_timeout_s = connect_timeout_s
        self.accelerator = _has_gpu() if accelerator is None else accelerator
        self._pulse = pulse
        if pulse is not None:
            _shell.place_pulse(pulse.communication_address)
        self._lock = threading.RLock()
        self._groups: dict[str, _Group] = {}
        self._mode = Mode.IDLE
        self._generation = -1
        self._fenced = -1  # operations of generations below this are refused
        self._connection: Connection | None = None
        self._cancellation = Cancellation()
        self._cancellation_of = -1  # the generation whose connecting it interrupts
        self._store_server: TCPStore | None = None
        self._forgotten = {_shell.Kind.SOLO: 0, _shell.Kind.CONNECTED: 0}
        self._default_request: BackendRequest | None = None

    # ---- modes -------------------------------------------------------------------------------------------------------

    def solo(self, generation: int) -> None:
        """From now on every group gets a backend that answers without peers. Existing groups too."""
        with self._lock:
            self._refuse_fenced(generation)
            self._drop_connection()
            self._enter(generation, Mode.SOLO)
            for group in self._groups.values():
                group.shell.set_local(generation, _local_kind(group.spec, solo=True))

    def connect(self, generation: int, host: str, port: int, timeout_s: float) -> int:
        """Replace the communicator of every group by one of ``generation``, met through the store at ``host:port``.

        Every rank must do so. Groups are connected in an order that is the same everywhere; groups made later connect
        at once, one after another. Returns the number of groups connected. Raises ``FencedError`` as soon as a newer
        generation is fenced, ``ConnectTimeoutError`` or ``GroupMismatchError``; the groups stay fenced then.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._refuse_fenced(generation)
            cancellation = self._cancellation = Cancellation()
            self._cancellation_of = generation
            self._prune()
            groups = sorted(self._groups.values(), key=lambda group: group.spec.order)
            for group in groups:
                group.shell.fence(generation)
        if not _shell.wait_retired(_MAX_RETIRING, min(timeout_s, _RETIRE_PATIENCE_S)):
            raise CommunicatorError(f"{_shell.retiring()} old communicators are still not destroyed")
        connection = Connection(generation=generation, rank=self.rank, host=host, port=port, cancellation=cancellation)
        pairs = cancellation.run(
            lambda: _connect_all(connection, groups, deadline),
            interrupt=connection.interrupt,
            discard=_discard,
            timeout_s=timeout_s + _GRACE_S,
            what=f"connecting generation {generation}",
        )
        with self._lock:
            if self._fenced > generation:
                _discard(pairs)
                raise FencedError(f"generation {generation} was fenced while it connected")
            # The old device must not lose its last reference here: its owner, destroyed elsewhere, holds another.
            self._drop_connection()
            for group, made in pairs:
                if made is None:
                    group.shell.set_local(generation, _shell.Kind.LOCAL)
                else:
                    group.shell.set_inner(generation, made.cpu, made.cuda)
            self._connection = connection
            self._enter(generation, Mode.CONNECTED)
        return len(groups)

    # ---- the end of a generation -------------------------------------------------------------------------------------

    def fence(self, generation: int) -> None:
        """After this no operation of a generation older than ``generation`` starts in any group (INV-4).

        Also ends a connect in progress. Never waits for an operation. Idempotent; any thread.
        """
        with self._lock:
            self._fenced = max(self._fenced, generation)
            for group in self._groups.values():
                group.shell.fence(generation)
            if self._cancellation_of < generation:
                self._cancellation.cancel()

    @property
    def fenced(self) -> bool:
        """Whether the generation that the groups belong to is over and the next one is not connected."""
        return self._fenced > self._generation

    @property
    def generation(self) -> int:
        """The generation that the groups belong to; -1 before the first."""
        return self._generation

    @property
    def mode(self) -> Mode:
        """What a group made now would get."""
        return self._mode

    def abort(self, timeout_s: float = 2.0) -> AbortReport:
        """Wake everybody blocked in an operation of the fenced generation, and wait until nothing of it runs.

        Sockets of gloo are shut down (only those recorded when they were made, never a listener, a store's or anybody
        else's), NCCL communicators aborted. Does nothing to a generation that is not fenced. Returns within about
        ``timeout_s`` seconds; when the report is not ``complete`` tensors must not be written by anybody else yet.
        Any thread; releases the GIL.
        """
        start = time.monotonic()
        with self._lock:
            connection = self._connection
            if connection is None or not self.fenced:
                return AbortReport(seconds=0.0, sockets=0, complete=True, detail="nothing to abort")
            shells = [group.shell for group in self._groups.values()]
        on_gpu = [backend for backend in (shell.inner("cuda") for shell in shells) if backend is not None]
        _, nccl_ended = nccl.abort_all(on_gpu, timeout_s=timeout_s)
        del on_gpu
        left = max(timeout_s - (time.monotonic() - start), 0.0)
        result = _shell.abort_connections(connection.ledger, shells, left)
        complete = nccl_ended and result.open_sockets == 0 and result.pending == 0
        detail = f"{result.open_sockets} sockets open, {result.pending} operations pending" if not complete else ""
        return AbortReport(
            seconds=time.monotonic() - start,
            sockets=result.sockets,
            complete=complete,
            detail=detail if nccl_ended else f"NCCL abort did not end; {detail}",
            lost=result.lost,
        )

    # ---- the store ---------------------------------------------------------------------------------------------------

    def open_store(self, host: str) -> tuple[TCPStore, int]:
        """Serve a fresh, empty rendezvous store from this process; returns it and its port (chosen by the system).

        ``host`` is the name by which the peers reach this machine. An earlier store of this process is closed: it
        belonged to a generation that is over. Raises ``CommunicatorError``. Any thread.
        """
        try:
            server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        except RuntimeError as error:
            raise CommunicatorError(f"cannot serve a store at {host}: {error}") from error
        with self._lock:
            earlier, self._store_server = self._store_server, server
        del earlier
        return server, server.port

    # ---- observation -------------------------------------------------------------------------------------------------

    def group_names(self) -> tuple[str, ...]:
        """Names of all groups, in the order in which they connect."""
        with self._lock:
            return tuple(group.spec.name for group in sorted(self._groups.values(), key=lambda g: g.spec.order))

    def counts(self) -> dict[str, GroupCounts]:
        """Per group: operations issued and completed in its generation. Any thread; never waits for an operation."""
        with self._lock:
            groups = list(self._groups.values())
        return {
            group.spec.name: GroupCounts(
                name=group.spec.name, ranks=group.spec.ranks, fenced=group.shell.fenced, **group.shell.counts()
            )
            for group in groups
        }

    def errors(self) -> dict[str, str]:
        """Groups whose NCCL communicator has an error of its own, and what it is. Any thread; waits for nothing."""
        with self._lock:
            groups = list(self._groups.values())
        found = {group.spec.shown: group.shell.error() for group in groups}
        return {name: _ERRORS.get(error, f"error {error}") for name, error in found.items() if error}

    def solo_operations(self) -> int:
        """Operations answered without peers since the beginning (groups of one member not counted)."""
        return self._total(_shell.Kind.SOLO)

    def remote_operations(self) -> int:
        """Operations issued on real communicators since the beginning."""
        return self._total(_shell.Kind.CONNECTED)

    def retiring(self) -> int:
        """Old communicators that are still being destroyed in the background."""
        return _shell.retiring()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Give up all groups, the connection and the store. Returns whether everything was destroyed in time.

        Operations raise from now on. Idempotent.
        """
        with self._lock:
            self._cancellation.cancel()
            self._drop_connection()
            for group in self._groups.values():
                self._hide(group)
                group.shell.release()
            self._groups.clear()
            self._store_server = None
            self._mode = Mode.IDLE
        return _shell.wait_retired(0, timeout_s)

    # ---- called by the torch patch -----------------------------------------------------------------------------------

    def request(self, backend: str | None) -> BackendRequest:
        """The communicators behind a ``backend=`` argument; ``None`` means those of the default group."""
        return parse_backend(backend, accelerator=self.accelerator, default=self._default_request)

    def set_default_request(self, request: BackendRequest) -> None:
        """Remember what the default group was made with."""
        self._default_request = request

    def create(self, spec: GroupSpec, timeout_s: float) -> _shell.ShellBackend:
        """A shell for a new group, filled as the mode demands. In solo mode nothing communicates; else its members
        connect now. Raises ``FencedError``, ``ConnectTimeoutError``, ``CommunicatorError``."""
        shell = _shell.ShellBackend(spec.group_rank, spec.size, timeout_s)
        with self._lock:
            self._prune()
            if spec.name in self._groups:
                raise CommunicatorError(f"group '{spec.name}' exists already")
            generation, mode, connection = self._generation, self._mode, self._connection
            self._refuse_fenced(generation)
            group = _Group(spec=spec, shell=shell)
            if mode is Mode.IDLE:
                raise CommunicatorError("groups can be made after solo() or connect()")
            if mode is Mode.SOLO or spec.size == 1:
                shell.set_local(generation, _local_kind(spec, solo=mode is Mode.SOLO))
                self._add(group)
                return shell
            cancellation = self._cancellation
        assert connection is not None
        deadline = time.monotonic() + self.connect_timeout_s
        made = cancellation.run(
            lambda: connection.communicator(spec, timeout_s=timeout_s, deadline=deadline),
            interrupt=connection.interrupt,
            discard=Communicator.discard,
            timeout_s=self.connect_timeout_s + _GRACE_S,
            what=f"connecting group '{spec.name}'",
        )
        with self._lock:
            if self.fenced:
                made.discard()
                raise FencedError(f"generation {generation} was fenced while group '{spec.name}' connected")
            shell.set_inner(generation, made.cpu, made.cuda)
            self._add(group)
        return shell

    # ---- private -----------------------------------------------------------------------------------------------------

    def _refuse_fenced(self, generation: int) -> None:
        if generation < self._fenced or generation < self._generation:
            raise FencedError(
                f"generation {generation} is over (fenced below {self._fenced}, connected {self._generation})"
            )

    def _enter(self, generation: int, mode: Mode) -> None:
        self._generation, self._mode = generation, mode
        if self._pulse is not None:
            self._pulse.set_generation(generation)

    def _add(self, group: _Group) -> None:
        self._groups[group.spec.name] = group
        if self._pulse is not None:
            group.place = self._pulse.add_group(
                group.spec.shown, group.spec.ranks, on_device=group.spec.request.has_nccl
            )
            if group.place is not None:
                group.shell.bind_counters(self._pulse.group_address(group.place), group.place)

    def _hide(self, group: _Group) -> None:
        """Show no operations of this group any more."""
        if self._pulse is not None and group.place is not None:
            group.shell.bind_counters(0)
            self._pulse.remove_group(group.place)
            group.place = None

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _prune(self) -> None:
        """Forget groups that their owner destroyed."""
        for name in [name for name, group in self._groups.items() if group.shell.closed]:
            group = self._groups.pop(name)
            self._hide(group)
            shell = group.shell
            for kind in self._forgotten:
                self._forgotten[kind] += shell.total(kind)

    def _total(self, kind: _shell.Kind) -> int:
        with self._lock:
            return self._forgotten[kind] + sum(group.shell.total(kind) for group in self._groups.values())


_Pairs = Sequence[tuple[_Group, Communicator | None]]


def _connect_all(connection: Connection, groups: Sequence[_Group], deadline: float) -> _Pairs:
    """Runs on a connecting thread: a communicator for every group with peers, in the order given."""
    specs = [group.spec for group in groups]
    connection.open(specs, deadline=deadline)
    connection.meet((rank for spec in specs for rank in spec.ranks), deadline=deadline)
    connection.verify(specs)
    pairs: list[tuple[_Group, Communicator | None]] = []
    try:
        for group in groups:
            made = None
            if group.spec.size > 1:
                made = connection.communicator(group.spec, timeout_s=group.shell.timeout_s, deadline=deadline)
            pairs.append((group, made))
    except CommunicatorError:
        _discard(pairs)
        raise
    return pairs


def _discard(pairs: _Pairs) -> None:
    for _, made in pairs:
        if made is not None:
            made.discard()


def _local_kind(spec: GroupSpec, *, solo: bool) -> _shell.Kind:
    return _shell.Kind.SOLO if solo and spec.size > 1 else _shell.Kind.LOCAL


def _has_gpu() -> bool:
    """Whether the driver shows a GPU; asked below ``torch.cuda``, which may be replaced by a stand-in."""
    count: Any = getattr(torch._C, "_cuda_getDeviceCount", None)
    return count is not None and bool(count() > 0)
