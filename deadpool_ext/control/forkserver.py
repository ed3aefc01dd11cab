"""The fork server: imports everything once, stays single-threaded, and forks warm workers and replicators on request.

Forking a process that has threads or an accelerator context copies locks that nobody will release; therefore this
process does nothing but wait. The agent starts it before its own event loop and talks to it over a socket pair.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NoReturn

import msgspec

from deadpool_ext.control.processes import die_with_parent, name_process, reset_signals, thread_count
from deadpool_ext.control.worker import WorkerStart, run_worker
from deadpool_ext.protocol.types import DeadpoolError
from deadpool_ext.replication.replicator import run_replicator

EXIT_PRELOAD_FAILED: Final = 74
_RECORD_BYTES: Final = 1 << 16


class ForkServerError(DeadpoolError):
    """The fork server is gone or could not be reached."""


class ForkWorkers(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Agent -> fork server: fork one worker per token, each connecting to the agent's abstract socket."""

    tokens: tuple[str, ...]
    socket_name: str


class ForkReplicator(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Agent -> fork server: fork a replicator. Its command socket and its listener come with the message."""

    token: str


class ServerReady(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Fork server -> agent: imports are done. ``threads`` should be 1; more makes forks unsafe."""

    threads: int
    preload_s: float


class PreloadFailed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Fork server -> agent: a module could not be imported; the server ends."""

    detail: str


class Forked(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Fork server -> agent: the process made for this token."""

    pid: int
    token: str


class Exited(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Fork server -> agent: a process that it forked ended and was reaped. ``status``: exit code, or minus the
    signal number."""

    pid: int
    status: int


Report = ServerReady | PreloadFailed | Forked | Exited

_encode: Final = msgspec.msgpack.Encoder().encode
_report_decoder: Final = msgspec.msgpack.Decoder(Report)
_command_decoder: Final = msgspec.msgpack.Decoder(ForkWorkers | ForkReplicator)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkServerConfig:
    """``preload``: modules to import before the first fork. ``secret``: workers prove themselves with it.
    ``job_secret``: replicators of the job know each other by it."""

    node: str
    secret: bytes = field(repr=False)
    job_secret: bytes = field(repr=False, default=b"")
    preload: tuple[str, ...] = ()
    host: str = "127.0.0.1"  # where other nodes reach this one


class ForkServer:
    """The agent's handle on its fork server. Not thread-safe; the socket may be watched by an event loop."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid: Final = pid
        self._sock = sock

    @classmethod
    def start(cls, config: ForkServerConfig) -> ForkServer:
        """Fork the server. Call from a single-threaded process, on its main thread."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                mine.close()
                die_with_parent(parent)
                reset_signals()
                _serve(theirs, config)
            except BaseException:  # nothing may return into the agent's stack
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        mine.setblocking(False)
        return cls(pid, mine)

    def fileno(self) -> int:
        """Descriptor that is readable when :meth:`reports` has something."""
        return self._sock.fileno()

    def fork_workers(self, tokens: tuple[str, ...], socket_name: str) -> None:
        """Ask for one worker per token. Raises :class:`ForkServerError` if the server is gone."""
        try:
            self._sock.send(_encode(ForkWorkers(tokens=tokens, socket_name=socket_name)))
        except OSError as error:
            raise ForkServerError(f"the fork server is gone: {error}") from error

    def fork_replicator(self, token: str, commands: socket.socket, listener: socket.socket) -> None:
        """Ask for a replicator that obeys the other end of ``commands`` and serves ``listener``; both may be closed
        here afterwards. Raises :class:`ForkServerError` if the server is gone."""
        try:
            socket.send_fds(self._sock, [_encode(ForkReplicator(token=token))], [commands.fileno(), listener.fileno()])
        except OSError as error:
            raise ForkServerError(f"the fork server is gone: {error}") from error

    def reports(self) -> list[Report]:
        """All reports that arrived, without blocking. Raises :class:`ForkServerError` when the server is gone."""
        found: list[Report] = []
        while True:
            try:
                data = self._sock.recv(_RECORD_BYTES)
            except BlockingIOError:
                return found
            except OSError as error:
                raise ForkServerError(str(error)) from error
            if not data:
                if found:
                    return found  # the end is reported by the next call
                raise ForkServerError("the fork server ended")
            found.append(_report_decoder.decode(data))

    def close(self) -> None:
        """Close the socket: the server ends, and its workers with it."""
        self._sock.close()


def preload_modules(targets: tuple[str, ...]) -> None:
    """Import modules by name, ``module`` or ``module:function`` (which is then called).

    Raises ImportError naming the module that failed.
    """
    for target in targets:
        name, _, function = target.partition(":")
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()


def _serve(sock: socket.socket, config: ForkServerConfig) -> NoReturn:
    name_process(f"dp-fork {config.node}")
    began = time.monotonic()
    try:
        preload_modules(config.preload)
    except ImportError as error:
        sock.send(_encode(PreloadFailed(detail=str(error))))
        os._exit(EXIT_PRELOAD_FAILED)
    gc.collect()
    gc.freeze()  # collections in the workers then leave the shared pages alone
    sock.send(_encode(ServerReady(threads=thread_count(), preload_s=time.monotonic() - began)))
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sock:
                    data, descriptors, _, _ = socket.recv_fds(sock, _RECORD_BYTES, 2)
                    if not data:
                        os._exit(0)
                    command = _command_decoder.decode(data)
                    match command:
                        case ForkWorkers():
                            for token in command.tokens:
                                _fork(sock, selector, token, partial(_be_worker, config, command.socket_name, token))
                        case ForkReplicator():
                            _fork(sock, selector, command.token, partial(_be_replicator, config, descriptors))
                    for descriptor in descriptors:
                        os.close(descriptor)
                else:
                    _reap(sock, selector, key.fd, key.data)


def _fork(sock: socket.socket, selector: selectors.BaseSelector, token: str, main: Callable[[], None]) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            for key in list(selector.get_map().values()):
                if key.fileobj is not sock:
                    os.close(key.fd)
            selector.close()
            sock.close()
            main()
        except BaseException:  # nothing may return into the server's loop
            traceback.print_exc()
        finally:
            os._exit(1)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data=pid)
    sock.send(_encode(Forked(pid=pid, token=token)))


def _be_worker(config: ForkServerConfig, socket_name: str, token: str) -> NoReturn:
    run_worker(
        WorkerStart(node=config.node, socket_name=socket_name, secret=config.secret, token=token, host=config.host)
    )


def _be_replicator(config: ForkServerConfig, descriptors: list[int]) -> NoReturn:
    name_process(f"dp-repl {config.node}")
    commands, listener = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    commands.setblocking(False)
    run_replicator(commands, listener, config.job_secret, config.node)
    os._exit(0)


def _reap(sock: socket.socket, selector: selectors.BaseSelector, pidfd: int, pid: int) -> None:
    _, status = os.waitpid(pid, 0)  # readable pidfd: the process has ended, this does not block
    selector.unregister(pidfd)
    os.close(pidfd)
    with contextlib.suppress(BrokenPipeError):
        sock.send(_encode(Exited(pid=pid, status=os.waitstatus_to_exitcode(status))))
