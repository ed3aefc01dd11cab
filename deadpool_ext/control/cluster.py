"""One node of a job whose nodes are started one by one: by hand, or by a scheduler, one task a node.

Node 0 also runs the coordinator and shows progress. All nodes share a secret, read from a file that only its owner
may read.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from deadpool_ext.control import processes
from deadpool_ext.control.agent import AgentConfig, run_agent
from deadpool_ext.control.coordinator_server import CoordinatorStart, listen, run_coordinator
from deadpool_ext.control.launcher import (
    PREFLIGHT,
    PRELOAD,
    PROTECTED_FLAG,
    end_everything,
    fork_child,
    make_job,
    operate,
    preload,
)
from deadpool_ext.control.operator import Children
from deadpool_ext.control.preflight import run_preflight
from deadpool_ext.control.progress import ProgressPrinter
from deadpool_ext.control.rundir import LOGS, prepare_run_directory
from deadpool_ext.control.wire import new_secret
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.deadlines import Deadlines
from deadpool_ext.protocol.types import UsageError

MIN_SECRET_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What ``deadpool launch`` was asked for. Node ids from ``nodes`` on are spares."""

    nodes: int
    ranks_per_node: int
    spares: int
    node_id: int
    coordinator: tuple[str, int]
    argv: tuple[str, ...]
    secret_file: Path | None = None
    run_dir: Path | None = None
    host: str | None = None
    deadlines: dict[str, float] = field(default_factory=dict)
    preload: tuple[str, ...] = PRELOAD
    preflight: str = PREFLIGHT


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_node(options: NodeOptions) -> int:
    """Be one node until the job is over; returns its exit code. Raises UsageError before anything was started."""
    _check(options)
    secret = read_secret(options)
    deadlines = Deadlines.from_options(options.deadlines)
    host = options.host or local_address(options.coordinator)
    agent = AgentConfig(
        node=f"n{options.node_id}",
        job_id=f"{os.getpid():x}",
        workers=options.ranks_per_node,
        coordinator=options.coordinator,
        secret=secret,
        host=host,
        connect_deadline_s=deadlines.join_s,
    )
    printer = ProgressPrinter()
    try:
        if options.node_id == 0:
            return _run_first(options, agent, deadlines, printer)
        preload(options.preload, printer, None)
        processes.adopt_orphans()
        return _wait(fork_child(partial(run_agent, agent), None))
    finally:
        end_everything()


def _check(options: NodeOptions) -> None:
    if options.nodes < 1 or options.ranks_per_node < 1 or options.spares < 0:
        raise UsageError("--nodes and --ranks-per-node must be at least 1, --spares not negative")
    if not 0 <= options.node_id < options.nodes + options.spares:
        raise UsageError(
            f"--node-id {options.node_id}: {options.nodes} nodes and {options.spares} spares have ids 0 to "
            f"{options.nodes + options.spares - 1}"
        )
    if not options.argv or not Path(options.argv[0]).is_file():
        raise UsageError(f"no such script: {options.argv[0] if options.argv else '(none given)'}")
    if PROTECTED_FLAG not in options.argv:
        raise UsageError(f"launch runs protected jobs: add {PROTECTED_FLAG} to the script's arguments, or use torchrun")


def read_secret(options: NodeOptions) -> bytes:
    """The job's secret. A job of one node needs none given. Raises UsageError."""
    path = options.secret_file
    if path is None:
        if options.nodes + options.spares == 1:
            return new_secret()
        raise UsageError("--secret-file is needed: the same file, with random content, on every node (chmod 600)")
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(f"secret file {path} can be read by others: chmod 600 {path}")
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"secret file {path}: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise UsageError(
            f"secret file {path} holds less than {MIN_SECRET_BYTES} bytes: head -c 32 /dev/urandom > {path}"
        )
    return secret


def local_address(coordinator: tuple[str, int]) -> str:
    """This machine's address on the route to the coordinator. Raises UsageError if there is none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(*coordinator, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: only picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"--coordinator {coordinator[0]}: {error.strerror or error}") from error


def _run_first(options: NodeOptions, agent: AgentConfig, deadlines: Deadlines, printer: ProgressPrinter) -> int:
    run_dir = prepare_run_directory(options.run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    logs = run_dir / LOGS
    preload(options.preload, printer, logs / "preload.log")
    preflight = run_preflight(
        options.preflight, options.argv, options.nodes, options.ranks_per_node, logs / "preflight.log"
    )
    printer = ProgressPrinter(preflight.train_iters, preflight.tokens_per_step)
    for warning in preflight.warnings:
        printer.line(f"* warning: {warning}")
    processes.adopt_orphans()
    try:
        listener = listen(*options.coordinator)
    except OSError as error:
        raise UsageError(
            f"--coordinator {options.coordinator[0]}:{options.coordinator[1]}: {error.strerror}"
        ) from error
    job_id = new_secret().hex()[:12]
    config = CoordinatorConfig(
        job=make_job(job_id=job_id, argv=options.argv, preflight=preflight, run_dir=run_dir, deadlines=deadlines),
        nodes=options.nodes,
        spares=options.spares,
        deadlines=deadlines,
        checkpoint=preflight.checkpoint,
        train_iters=preflight.train_iters,
    )
    start = CoordinatorStart(
        config=config,
        run_dir=run_dir,
        listener=listener,
        secret=agent.secret,
        reachable_at=options.coordinator[0],
    )
    coordinator = fork_child(partial(run_coordinator, start), logs / "coordinator.log")
    listener.close()
    pid = fork_child(partial(run_agent, agent), logs / agent.node / "agent.log")
    printer.line(
        f"job {job_id}: coordinator at {options.coordinator[0]}:{options.coordinator[1]}, this is {agent.node}"
    )
    children = Children(coordinator=coordinator, agents={agent.node: pid})
    return operate(children, printer, options.coordinator, agent.secret, run_dir=run_dir, needed=0)


def _wait(pid: int) -> int:
    """Wait for the agent; a signal ends it, and with it the node."""

    def interrupt(number: int, frame: object) -> None:
        raise _Interrupted(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        _, status = os.waitpid(pid, 0)
    except _Interrupted as stop:
        return 128 + stop.number
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
