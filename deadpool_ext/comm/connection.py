"""One generation's connection to the peers: its store client, gloo device, communicators and their sockets."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed import DistError

from deadpool_ext import _shell
from deadpool_ext.comm import nccl
from deadpool_ext.comm.background import Cancellation
from deadpool_ext.comm.errors import CommunicatorError, ConnectTimeoutError, FencedError, GroupMismatchError
from deadpool_ext.comm.group import GroupSpec

_DEVICE_ATTEMPTS = 5

# Making a gloo device and finding its listener must not be mixed up with another thread doing the same.
_device_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicator:
    """What goes into one group's shell: a communicator per device type."""

    cpu: Backend | None
    cuda: Backend | None

    def discard(self) -> None:
        """Have it destroyed on a native thread. The caller must drop its reference next."""
        _shell.retire([backend for backend in (self.cpu, self.cuda) if backend is not None])


@dataclass(kw_only=True, slots=True)
class _Peers:
    """Listening endpoints of every rank met so far, and what each built."""

    endpoints: set[str] = field(default_factory=set)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)


class Connection:
    """Everything that belongs to one generation and goes away with it.

    Methods that wait are bounded by their ``deadline`` (monotonic seconds) and called from one thread at a time;
    ``interrupt`` and ``close`` from any thread.
    """

    def __init__(self, *, generation: int, rank: int, host: str, port: int, cancellation: Cancellation) -> None:
        self.generation = generation
        self.ledger = _shell.SocketLedger()
        self._store_sockets = _shell.SocketLedger()
        self._rank = rank
        self._host = host
        self._port = port
        self._cancellation = cancellation
        self._peers = _Peers()
        self._store: TCPStore | None = None
        self._devices: list[ProcessGroupGloo.Device] = []
        self._listening: set[str] = set()

    def open(self, groups: Iterable[GroupSpec], *, deadline: float) -> None:
        """Connect to the store, listen, and tell the peers where and which groups this rank has."""
        before = {found.cookie for found in _shell.tcp_sockets()}
        try:
            self._store = TCPStore(
                self._host, self._port, is_master=False, wait_for_workers=False, timeout=_remaining(deadline)
            )
        except RuntimeError as error:
            raise ConnectTimeoutError(
                f"generation {self.generation}: no store at {self._host}:{self._port}: {error}"
            ) from error
        for found in _shell.tcp_sockets():
            if found.cookie not in before and found.remote.endswith(f":{self._port}"):
                self._store_sockets.add(found)
        self._devices, self._listening = _make_devices(self._host, self._port)
        record = {
            "listening": sorted(self._listening),
            "groups": {group.name: group.digest for group in groups if group.size > 1},
        }
        self._store.set(self._key(self._rank), json.dumps(record))

    def interrupt(self) -> None:
        """End a wait on the store by cutting this generation's client off; the connection is of no use afterwards."""
        self._store_sockets.shutdown_all()

    def meet(self, ranks: Iterable[int], *, deadline: float) -> None:
        """Wait until each of these ranks has opened its connection of this generation, and learn where it listens."""
        strangers = [rank for rank in sorted(set(ranks)) if rank != self._rank and rank not in self._peers.digests]
        if not strangers:
            return
        store = self._opened()
        keys = [self._key(rank) for rank in strangers]
        self._check("meeting the peers")
        try:
            store.wait(keys, _remaining(deadline))
        except DistError as error:
            self._check("meeting the peers")
            raise ConnectTimeoutError(
                f"generation {self.generation}: ranks {self._absent(strangers)} did not arrive: {error}"
            ) from error
        for rank, text in zip(strangers, store.multi_get(keys), strict=True):
            record = json.loads(text)
            self._peers.endpoints.update(record["listening"])
            self._peers.digests[rank] = record["groups"]

    def verify(self, groups: Iterable[GroupSpec]) -> None:
        """Raise ``GroupMismatchError`` unless every peer announced the groups it shares with this rank, alike."""
        mine = {group.name: group for group in groups if group.size > 1}
        for rank, theirs in self._peers.digests.items():
            shared = {name: group.digest for name, group in mine.items() if rank in group.ranks}
            wrong = sorted(name for name, digest in shared.items() if theirs.get(name) != digest)
            if wrong:
                raise GroupMismatchError(
                    f"ranks {self._rank} and {rank} disagree about groups {', '.join(wrong)} in generation "
                    f"{self.generation}: one of them built other groups"
                )

    def communicator(self, group: GroupSpec, *, timeout_s: float, deadline: float) -> Communicator:
        """Make this group's communicators together with its other members, who must all do so in the same order.

        ``timeout_s`` is what the group's operations get afterwards.
        """
        self.meet(group.ranks, deadline=deadline)
        self._check(f"connecting group '{group.name}'")
        cpu: Backend | None = None
        cuda: Backend | None = None
        # Two device types of one group must not share keys.
        prefix = f"g{self.generation}/{group.name}"
        try:
            if group.request.has_gloo:
                options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub calls it Options
                options._devices = self._devices
                options._threads = 2 * len(self._devices)
                # Also how long a later point-to-point operation waits, which cannot be changed afterwards; making the
                # group is bounded by the caller instead.
                options._timeout = timedelta(seconds=timeout_s)
                store = PrefixStore(f"{prefix}/cpu", self._opened())
                cpu = ProcessGroupGloo(store, group.group_rank, group.size, options)
                self.ledger.record(self._listening, self._peers.endpoints)
            if group.request.has_nccl:
                store = PrefixStore(f"{prefix}/cuda", self._opened())
                cuda = nccl.make(store, group, timeout_s=timeout_s)
        except RuntimeError as error:  # gloo's own errors, and the store's
            self._check(f"connecting group '{group.name}'")
            raise ConnectTimeoutError(
                f"generation {self.generation}: group '{group.name}' of ranks {_ranks(group.ranks)} did not connect: "
                f"{error}"
            ) from error
        return Communicator(cpu=cpu, cuda=cuda)

    def close(self) -> None:
        """Drop store client and devices; communicators made here stay usable. Idempotent."""
        self._store = None
        self._devices = []

    def _key(self, rank: int) -> str:
        return f"g{self.generation}/rank/{rank}"

    def _opened(self) -> TCPStore:
        if self._store is None:
            raise CommunicatorError(f"the connection of generation {self.generation} is closed")
        return self._store

    def _absent(self, ranks: Sequence[int]) -> str:
        try:
            return _ranks([rank for rank in ranks if not self._opened().check([self._key(rank)])])
        except DistError:
            return _ranks(ranks)

    def _check(self, what: str) -> None:
        if self._cancellation.cancelled:
            raise FencedError(f"generation {self.generation}: {what} was interrupted by a fence")


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _make_devices(host: str, port: int) -> tuple[list[ProcessGroupGloo.Device], set[str]]:
    """One gloo device per interface for all groups of a generation, and the endpoints it listens at.

    ``GLOO_SOCKET_IFNAME`` names the interfaces as upstream; otherwise it is the address from which this machine reaches
    the store, which the peers can reach too. Gloo does not tell where it listens, so the listener is the socket that
    was not there before; another thread's, opened in the same instant, makes it try again.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    with _device_lock:
        for _ in range(_DEVICE_ATTEMPTS):
            before = {found.cookie for found in _shell.tcp_sockets() if found.listening}
            if names:
                devices = [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names]
            else:
                devices = [ProcessGroupGloo.create_device(hostname=_local_address(host, port), lazy_init=False)]
            new = [found for found in _shell.tcp_sockets() if found.listening and found.cookie not in before]
            if len(new) == len(devices):
                return devices, {found.local for found in new}
    raise CommunicatorError("cannot tell which socket gloo listens at: other threads keep opening listeners")


def _local_address(host: str, port: int) -> str:
    """The address of this machine from which ``host`` is reached (nothing is sent)."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
