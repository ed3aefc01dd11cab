"""The baseline: the same script with nothing of ours in the way, as torchrun would start it."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from deadpool_ext.control import processes
from deadpool_ext.control.progress import ProgressPrinter, summary_lines
from deadpool_ext.control.rundir import LOGS
from deadpool_ext.control.worker import apply_environment, leave, log_path, redirect_output, run_script

_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_plain(
    argv: tuple[str, ...],
    nodes: tuple[str, ...],
    ranks_per_node: int,
    run_dir: Path,
    printer: ProgressPrinter,
    environment: Mapping[str, str],
) -> int:
    """Fork one worker a rank with the environment that torchrun sets; exit code 0 if all end with 0, else 1.

    Rank 0 hosts the rendezvous store at MASTER_PORT. When one worker fails the others are killed.
    """
    world_size = len(nodes) * ranks_per_node
    port = _free_port()
    printer.line(f"unprotected: {len(nodes)} nodes of {ranks_per_node} ranks, logs in {run_dir / LOGS}")
    workers: dict[int, int] = {}
    began = time.monotonic()
    try:
        for number in _INTERRUPTS:
            signal.signal(number, _interrupt)
        for rank in range(world_size):
            log = log_path(str(run_dir / LOGS), nodes[rank // ranks_per_node], rank)
            variables = dict(environment) | {
                "DEADPOOL_RUN_DIR": str(run_dir),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GROUP_RANK": str(rank // ranks_per_node),
            }
            workers[_fork(argv, rank, world_size, ranks_per_node, log, variables)] = rank
        failed = _wait(workers)
    except _Interrupted as stop:
        code = 128 + stop.number
        reason = f"interrupted by {signal.Signals(stop.number).name}"
    else:
        code, reason = (0, "") if failed is None else (1, _failure(*failed, nodes, ranks_per_node, run_dir))
    finally:
        for number in _INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)
        for pid in workers:
            processes.kill_tree(pid)
    printer.line(f"unprotected run ended after {time.monotonic() - began:.1f} s")
    for line in summary_lines({}, str(run_dir), code, reason):
        printer.line(line)
    return code


def _interrupt(number: int, frame: object) -> None:
    raise _Interrupted(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork(
    argv: tuple[str, ...],
    rank: int,
    world_size: int,
    ranks_per_node: int,
    log: Path | None,
    variables: Mapping[str, str],
) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        processes.die_with_parent(parent)
        processes.reset_signals()
        processes.name_process(f"dp-plain r{rank}")
        redirect_output(log)
        apply_environment(rank, rank % ranks_per_node, world_size, ranks_per_node)
        os.environ.update(variables)
        leave(run_script(argv).code)
    except BaseException:  # nothing may return into the launcher's stack
        traceback.print_exc()
    finally:
        os._exit(1)


def _wait(workers: dict[int, int]) -> tuple[int, int] | None:
    """Wait for all workers, or for the first that fails: (rank, status)."""
    with selectors.DefaultSelector() as selector:
        try:
            for pid in workers:
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data=pid)
            while workers:
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    status = processes.reap(key.data)
                    rank = workers.pop(key.data)
                    if status != 0:
                        return rank, -1 if status is None else status
        finally:
            for key in list(selector.get_map().values()):
                os.close(key.fd)
    return None


def _failure(rank: int, status: int, nodes: tuple[str, ...], ranks_per_node: int, run_dir: Path) -> str:
    path = log_path(str(run_dir / LOGS), nodes[rank // ranks_per_node], rank)
    last = ""
    if path is not None and path.exists():
        lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else ""
    return f"rank {rank} ended with status {status}: {last} (see {path})"
