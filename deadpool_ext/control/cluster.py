"""One node of a job whose nodes are started one by one: by hand, or by a scheduler, one task a node.

Node 0 also runs the coordinator and shows progress. All nodes share a secret, read from a file that only its owner
may read. More nodes than the job was started for may come at any time: they wait as spares.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import sys
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
from deadpool_ext.control.operator_client import is_running, whereabouts
from deadpool_ext.control.preflight import run_preflight
from deadpool_ext.control.progress import ProgressPrinter
from deadpool_ext.control.rundir import LOGS, STATUS, kept_if_usable, prepare_run_directory
from deadpool_ext.control.wire import new_secret
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.deadlines import Deadlines
from deadpool_ext.protocol.types import UsageError

MIN_SECRET_BYTES: Final = 16
GOODBYE_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What ``deadpool launch`` was asked for. Nodes from number ``nodes`` on are spares, others than ``nI`` too.

    ``nodes`` is None for a node that joins a job which others began: it is told everything about it.
    """

    node: str
    coordinator: tuple[str, int]
    ranks_per_node: int
    nodes: int | None = None
    spares: int = 0
    argv: tuple[str, ...] = ()
    secret_file: Path | None = None
    secret: bytes | None = field(default=None, repr=False)  # instead of the file
    run_dir: Path | None = None
    host: str | None = None
    deadlines: dict[str, float] = field(default_factory=dict)
    preload: tuple[str, ...] = PRELOAD
    preflight: str = PREFLIGHT


FIRST: Final = "n0"  # it runs the coordinator
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


def node_name(text: str) -> str:
    """``--node-id``: a number I means ``nI``. Raises UsageError."""
    if not _NAME.fullmatch(text):
        raise UsageError(f"--node-id {text}: give a number, or a name of letters, digits, '.', '_' and '-'")
    return f"n{int(text)}" if text.isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class FoundJob:
    """A running job, from its run directory."""

    coordinator: tuple[str, int]
    secret: bytes = field(repr=False)
    ranks_per_node: int


def find_job(run_dir: Path) -> FoundJob:
    """What a node that joins must know. Raises UsageError where there is no running job."""
    host, port, secret = whereabouts(run_dir)
    if is_running(run_dir) is False:
        raise UsageError(f"{run_dir}: nobody answers at {host}:{port}: the job is not running")
    try:
        nodes = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))["nodes"]
        width = max((len(node["seats"]) for node in nodes.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{run_dir / STATUS}: not readable ({error!r})") from error
    if not width:
        raise UsageError(f"{run_dir}: the job has not begun yet; try again, or give --coordinator and --secret-file")
    return FoundJob(coordinator=(host, port), secret=secret, ranks_per_node=width)


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
        node=options.node,
        job_id=f"{os.getpid():x}",
        workers=options.ranks_per_node,
        coordinator=options.coordinator,
        secret=secret,
        host=host,
        connect_deadline_s=deadlines.join_s,
    )
    printer = ProgressPrinter()
    try:
        if options.node == FIRST:
            return _run_first(options, agent, deadlines, printer)
        preload(options.preload, printer, None)
        processes.adopt_orphans()
        return _wait(options.node, fork_child(partial(run_agent, agent), None))
    finally:
        end_everything()


def _check(options: NodeOptions) -> None:
    if options.ranks_per_node < 1 or options.spares < 0 or (options.nodes is not None and options.nodes < 1):
        raise UsageError("--nodes and --ranks-per-node must be at least 1, --spares not negative")
    if options.nodes is None:
        if options.node == FIRST:
            raise UsageError("node 0 begins a job: --nodes is needed; to join one, take another --node-id")
        return
    if not options.argv or not Path(options.argv[0]).is_file():
        raise UsageError(f"no such script: {options.argv[0] if options.argv else '(none given)'}")
    if PROTECTED_FLAG not in options.argv:
        raise UsageError(f"launch runs protected jobs: add {PROTECTED_FLAG} to the script's arguments, or use torchrun")


def read_secret(options: NodeOptions) -> bytes:
    """The job's secret. A job of one node needs none given. Raises UsageError."""
    path = options.secret_file
    if options.secret is not None:
        return options.secret
    if path is None:
        if options.nodes == 1 and not options.spares and options.node == FIRST:
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
    run_dir = (options.run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")).absolute()
    with kept_if_usable(run_dir):
        return _run_in(run_dir, options, agent, deadlines, printer)


def _run_in(
    run_dir: Path, options: NodeOptions, agent: AgentConfig, deadlines: Deadlines, printer: ProgressPrinter
) -> int:
    assert options.nodes is not None
    prepare_run_directory(run_dir)
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


def _wait(node: str, pid: int) -> int:
    """Wait for the agent; a signal makes it say goodbye to the job, and end with its node."""

    def interrupt(number: int, frame: object) -> None:
        raise _Interrupted(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        _, status = os.waitpid(pid, 0)
    except _Interrupted as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        print(f"deadpool: node {node} leaves the job ({signal.Signals(stop.number).name})", file=sys.stderr)
        processes.send_signal(pid, signal.SIGTERM)
        end = time.monotonic() + GOODBYE_S
        while processes.reap(pid) is None and time.monotonic() < end:
            time.sleep(0.01)
        return 128 + stop.number
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
