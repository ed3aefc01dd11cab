"""Many ranks of one job on one machine, forked after one import."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

HOST = "127.0.0.1"


class RankFailed(Exception):
    """A rank ended with an error; the text holds the end of its log."""


def _fork(work: Callable[[], int]) -> int:
    """Run ``work`` in a child that dies with this process; returns its pid."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _die_with_parent(parent)
        code = work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # the process ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not exit(): what the parent registered to be done at its end is not the child's to do


def _die_with_parent(parent: int) -> None:
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def rendezvous_store() -> Iterator[int]:
    """A TCP store in a process of its own, on a port that the system chose; yields the port."""
    read_end, write_end = os.pipe()

    def serve() -> int:
        from torch.distributed import TCPStore

        os.close(read_end)
        store = TCPStore(HOST, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        os.write(write_end, f"{store.port}\n".encode())
        signal.pause()
        return 0

    pid = _fork(serve)
    os.close(write_end)
    try:
        ready, _, _ = select.select([read_end], [], [], 60)
        port = os.read(read_end, 16).decode().strip() if ready else ""
        if not port:
            raise RankFailed("the rendezvous store did not start")
        yield int(port)
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_ranks(world_size: int, work: Callable[[int], int], *, logs: Path, seconds: float = 120) -> None:
    """Run ``work(rank)`` in ``world_size`` forked processes with torchrun's environment; output to ``logs/RANK.log``.

    Returns when all ended with 0. Raises :class:`RankFailed` on the first that did not, or after ``seconds``; the
    others are killed then.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with rendezvous_store() as port:
        pids: dict[int, int] = {}
        for rank in range(world_size):
            pids[_fork(partial(_be_rank, rank, world_size, port, work, logs))] = rank
        _wait(pids, logs, time.monotonic() + seconds)


def _be_rank(rank: int, world_size: int, port: int, work: Callable[[int], int], logs: Path) -> int:
    log = os.open(logs / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        # Every rank is a client of the store above, as under torchrun.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return work(rank)


def _wait(pids: dict[int, int], logs: Path, deadline: float) -> None:
    alive = dict(pids)
    watched = {os.pidfd_open(pid): pid for pid in pids}
    try:
        while alive:
            ready, _, _ = select.select(list(watched), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(alive.values())} did not end in time; rank 0:\n{_end(logs, 0)}")
            for descriptor in ready:
                pid = watched.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                rank = alive.pop(pid)
                if status:
                    code = os.waitstatus_to_exitcode(status)
                    raise RankFailed(f"rank {rank} ended with {code}:\n{_end(logs, rank)}")
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for descriptor in watched:
            os.close(descriptor)


def _end(logs: Path, rank: int) -> str:
    return (logs / f"{rank}.log").read_text()[-3000:]
