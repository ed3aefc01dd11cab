"""A worker process, from its fork to the end of the training script.

It starts warm: connected to the agent, imports done, no seat. ``TakeSeat`` tells it who it is; only then are its
environment, working directory and log file set and the script run as ``__main__``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from deadpool_ext.control import session as worker_session
from deadpool_ext.control import stacks
from deadpool_ext.control.processes import name_process
from deadpool_ext.control.session import SessionError, SessionLostError, WorkerSession
from deadpool_ext.control.wire import BlockingConnection, ConnectionLostError, WireError
from deadpool_ext.protocol.messages import TakeSeat, WorkerExited, WorkerHello

EXIT_INTERNAL: Final = 73
THREAD_JOIN_S: Final = 300.0
_ERROR_CHARS: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """What a worker knows at its fork: its node, the agent's abstract socket, and how to prove itself there."""

    node: str
    socket_name: str  # without the leading NUL
    secret: bytes = field(repr=False)
    token: str
    host: str = "127.0.0.1"  # where other nodes reach this one


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptEnd:
    """How a script ended: exit code, and the last line of its own exception (empty if it had none)."""

    code: int
    error: str = ""
    exception: BaseException | None = None


def run_worker(start: WorkerStart) -> NoReturn:
    """Be a worker; never returns. Call in a freshly forked, single-threaded process."""
    name_process(f"dp-warm {start.node}")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.connect(f"\0{start.socket_name}")
        connection = BlockingConnection.open(sock, start.secret, client=True)
        connection.send(WorkerHello(pid=os.getpid(), token=start.token))
        seat = connection.receive()
    except (OSError, ConnectionLostError):
        os._exit(0)  # the agent needs no warm worker any more
    except WireError:
        traceback.print_exc()
        os._exit(EXIT_INTERNAL)
    if not isinstance(seat, TakeSeat):
        os._exit(EXIT_INTERNAL)
    _run_seat(start, seat, connection)


def _run_seat(start: WorkerStart, seat: TakeSeat, connection: BlockingConnection) -> NoReturn:
    name_process(f"dp-r{seat.rank} {start.node}")
    try:
        redirect_output(log_path(seat.job.log_dir, start.node, seat.rank))
        print(
            f"deadpool: node {start.node} rank {seat.rank} generation {seat.generation} pid {os.getpid()}",
            file=sys.stderr,
        )
        os.environ.update(seat.job.env)
        os.environ["DEADPOOL_HOST"] = start.host
        os.environ["DEADPOOL_WORKER"] = "1"
        apply_environment(seat.rank, seat.local_rank, seat.job.layout.world_size, seat.job.layout.ranks_per_node)
        os.chdir(seat.job.cwd)
        session = WorkerSession(connection, seat, start.node, start.host)
        if seat.stack_path:
            stacks.answer_from_now_on(seat.stack_path)
        worker_session.install(session)
        session.start()
        end = run_script(seat.job.argv)
        if end.code != 0:
            with contextlib.suppress(SessionLostError):
                session.send(
                    WorkerExited(
                        rank=seat.rank,
                        generation=session.generation,
                        status=end.code,
                        script_error=end.error,
                        cause=session.cause_of(end.exception) if end.exception is not None else "script",
                        iteration=session.iteration,
                    )
                )
        leave(end.code)
    except BaseException:  # nothing may return into the fork server's stack
        traceback.print_exc()
    finally:
        os._exit(EXIT_INTERNAL)


def log_path(log_dir: str, node: str, rank: int) -> Path | None:
    """``log_dir/NODE/RANK.log``, or None where ``log_dir`` is empty."""
    return Path(log_dir) / node / f"{rank}.log" if log_dir else None


def redirect_output(path: Path | None) -> None:
    """Send stdout and stderr to a file (appended; None: leave them), stdin to /dev/null."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    # New objects: the inherited ones may be buffered as a pipe's, or replaced by whoever imported us.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def apply_environment(rank: int, local_rank: int, world_size: int, ranks_per_node: int) -> None:
    """Set the rank variables that launchers set; nothing may meet through a store that outlives a generation."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(ranks_per_node),
    )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def run_script(argv: tuple[str, ...]) -> ScriptEnd:
    """Run ``argv[0]`` as ``__main__`` with ``argv``, as ``python argv...`` would. Prints what ended it."""
    script = os.path.abspath(argv[0])
    sys.argv = list(argv)
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or stop.code == 0:
            return ScriptEnd(code=0)
        if isinstance(stop.code, int):
            return ScriptEnd(code=stop.code & 0xFF or 1, error=f"the script exited with code {stop.code}")
        print(stop.code, file=sys.stderr)
        return ScriptEnd(code=1, error=_one_line(str(stop.code)))
    except SessionError as error:  # the control plane ended it, not the script
        traceback.print_exc()
        print(f"deadpool: {error}", file=sys.stderr)
        return ScriptEnd(code=worker_session.EXIT_SESSION_LOST)
    except BaseException as error:
        traceback.print_exc()
        return ScriptEnd(code=1, error=_one_line(traceback.format_exception_only(error)[-1]), exception=error)
    return ScriptEnd(code=0)


def _one_line(text: str) -> str:
    lines = text.strip().splitlines() or ["unknown error"]
    return lines[0][:_ERROR_CHARS]


def leave(code: int) -> NoReturn:
    """End the process as an interpreter would (threads, exit handlers, buffers), but bounded, without finalization.

    Finalization would run destructors of objects inherited from the fork server's preload.
    """
    if code == 0:
        end = time.monotonic() + THREAD_JOIN_S
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
