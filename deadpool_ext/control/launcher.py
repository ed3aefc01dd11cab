"""A whole job on one machine: coordinator, nodes and spares as process trees of this process.

Everything is imported once, here; all other processes are forked from this one before any thread exists. Each child
dies with its parent, so nothing outlives this process, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from deadpool_ext.control import processes
from deadpool_ext.control.agent import AgentConfig, run_agent
from deadpool_ext.control.coordinator_server import CoordinatorStart, listen, run_coordinator
from deadpool_ext.control.forkserver import preload_modules
from deadpool_ext.control.operator import Children, Operator
from deadpool_ext.control.plain import run_plain
from deadpool_ext.control.preflight import Preflight, run_preflight
from deadpool_ext.control.progress import ProgressPrinter, summary_lines
from deadpool_ext.control.rundir import CONTROL, EVENTS, FINAL, LOGS, STATUS, kept_if_usable, prepare_run_directory
from deadpool_ext.control.wire import new_secret
from deadpool_ext.control.worker import redirect_output
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.deadlines import Deadlines
from deadpool_ext.protocol.faults import FaultSpec, parse_faults
from deadpool_ext.protocol.messages import JobEnded, JobSpec
from deadpool_ext.protocol.types import UsageError

#: Nothing may be imported before it: it sets what keeps the libraries single-threaded, which they read when loaded.
PRELOAD: Final = ("megatron.hotswap.preload:preload",)
#: On top of that for a protected job, so that a spare imports nothing when it takes a seat.
PRELOAD_PROTECTED: Final = (*PRELOAD, "megatron.hotswap.runtime")
PREFLIGHT: Final = "megatron.hotswap.preflight:inspect"
PROTECTED_FLAG: Final = "--deadpool"
#: Set where the user has not: one thread a worker, and nothing that starts threads before a fork.
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
_END_DEADLINE_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """What ``deadpool local`` was asked for. ``argv``: the script and its arguments."""

    nodes: int
    ranks_per_node: int
    spares: int
    argv: tuple[str, ...]
    run_dir: Path | None = None
    faults: tuple[str, ...] = ()
    seed: int | None = None
    preload: tuple[str, ...] = PRELOAD
    preflight: str = PREFLIGHT
    deadlines: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Checked options."""

    options: LocalOptions
    argv: tuple[str, ...]
    names: tuple[str, ...]
    faults: tuple[FaultSpec, ...]
    deadlines: Deadlines
    run_dir: Path


def preload_for(argv: tuple[str, ...]) -> tuple[str, ...]:
    """What is imported before the workers of this script are forked."""
    return PRELOAD_PROTECTED if PROTECTED_FLAG in argv else PRELOAD


def run_local(options: LocalOptions) -> int:
    """Run a job to its end; returns its exit code. Raises UsageError before anything was started."""
    run_dir = (options.run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")).absolute()
    with kept_if_usable(run_dir):
        return _run_local(options, run_dir)


def _run_local(options: LocalOptions, run_dir: Path) -> int:
    plan = check(options, run_dir)
    printer = ProgressPrinter()
    preload(options.preload, printer, plan.run_dir / LOGS / "preload.log")
    preflight = run_preflight(
        options.preflight, plan.argv, options.nodes, options.ranks_per_node, plan.run_dir / LOGS / "preflight.log"
    )
    for fault in plan.faults:
        if preflight.train_iters is not None and (fault.step or 0) > preflight.train_iters:
            raise UsageError(f"fault {fault.text!r}: the job ends after step {preflight.train_iters}")
    printer = ProgressPrinter(preflight.train_iters, preflight.tokens_per_step)
    for warning in preflight.warnings:
        printer.line(f"* warning: {warning}")
    processes.adopt_orphans()
    try:
        if PROTECTED_FLAG not in plan.argv or not preflight.protected:
            return run_plain(
                plan.argv, plan.names[: options.nodes], options.ranks_per_node, plan.run_dir, printer, dict(ENVIRONMENT)
            )
        return _run_protected(plan, preflight, printer)
    finally:
        end_everything()


def check(options: LocalOptions, run_dir: Path) -> Plan:
    """Check everything that can be checked without importing the script's side; makes the run directory."""
    if options.nodes < 1 or options.ranks_per_node < 1:
        raise UsageError("--nodes and --ranks-per-node must be at least 1")
    if options.spares < 0:
        raise UsageError("--spares must not be negative")
    if not options.argv:
        raise UsageError("no script given: deadpool local [OPTIONS] -- pretrain_gpt.py ARGS...")
    if not Path(options.argv[0]).is_file():
        raise UsageError(f"no such script: {options.argv[0]}")
    names = tuple(f"n{number}" for number in range(options.nodes + options.spares))
    faults = parse_faults(options.faults, names)
    deadlines = Deadlines.from_options(options.deadlines)
    if faults and PROTECTED_FLAG not in options.argv:
        raise UsageError("--fault needs a protected job: add --deadpool to the script's arguments")
    argv = options.argv
    if options.seed is not None and "--seed" not in argv:
        argv = (*argv, "--seed", str(options.seed))
    return Plan(
        options=options,
        argv=argv,
        names=names,
        faults=faults,
        deadlines=deadlines,
        run_dir=prepare_run_directory(run_dir),
    )


@contextlib.contextmanager
def output_to(log: Path | None) -> Iterator[None]:
    """What this process prints goes to ``log`` for a while, whoever prints it (None: to nobody)."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    file = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def preload(targets: tuple[str, ...], printer: ProgressPrinter, log: Path | None) -> None:
    """Import what the workers need, once; the libraries' warnings go to ``log`` (None: to nobody).

    Raises UsageError naming what cannot be imported.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    began = time.monotonic()
    try:
        with output_to(log):
            preload_modules(targets)
    except ImportError as error:
        raise UsageError(f"the training environment is not complete: {error}") from error
    if targets:
        printer.line(f"imported the trainer once, for all processes, in {time.monotonic() - began:.1f} s")
    if (threads := processes.thread_count()) != 1:
        printer.line(
            f"* warning: {threads} threads after the imports; forked processes may inherit locks that are held"
        )


def make_job(
    *,
    job_id: str,
    argv: tuple[str, ...],
    preflight: Preflight,
    run_dir: Path,
    deadlines: Deadlines,
    faults: tuple[FaultSpec, ...] = (),
) -> JobSpec:
    """The job as every node is told it; paths are this machine's."""
    return JobSpec(
        job_id=job_id,
        argv=argv,
        cwd=os.getcwd(),
        env={"DEADPOOL_RUN_DIR": str(run_dir)},
        layout=preflight.layout,
        faults=tuple(fault.to_dict() for fault in faults),
        options=deadlines.to_options(),
        policy=dict(preflight.policy),
        log_dir=str(run_dir / LOGS),
    )


def _run_protected(plan: Plan, preflight: Preflight, printer: ProgressPrinter) -> int:
    options = plan.options
    job_id = new_secret().hex()[:12]
    secret = new_secret()
    listener = listen("127.0.0.1")
    address: tuple[str, int] = listener.getsockname()[:2]
    logs = plan.run_dir / LOGS
    config = CoordinatorConfig(
        job=make_job(
            job_id=job_id,
            argv=plan.argv,
            preflight=preflight,
            run_dir=plan.run_dir,
            deadlines=plan.deadlines,
            faults=plan.faults,
        ),
        nodes=options.nodes,
        spares=options.spares,
        deadlines=plan.deadlines,
        checkpoint=preflight.checkpoint,
        train_iters=preflight.train_iters,
    )
    start = CoordinatorStart(config=config, run_dir=plan.run_dir, listener=listener, secret=secret)
    coordinator = fork_child(partial(run_coordinator, start), logs / "coordinator.log")
    listener.close()
    agents = {}
    for name in plan.names:
        agent = AgentConfig(
            node=name, job_id=job_id, workers=options.ranks_per_node, coordinator=address, secret=secret
        )
        agents[name] = fork_child(partial(run_agent, agent), logs / name / "agent.log")
    printer.line(f"job {job_id}: starting {len(plan.names)} nodes, run directory {plan.run_dir}")
    children = Children(coordinator=coordinator, agents=agents)
    return operate(children, printer, address, secret, run_dir=plan.run_dir, needed=options.nodes)


def operate(
    children: Children,
    printer: ProgressPrinter,
    address: tuple[str, int],
    secret: bytes,
    *,
    run_dir: Path,
    needed: int,
) -> int:
    """Watch the job to its end, end all processes, print the summary; returns the exit code."""

    async def watch() -> JobEnded:
        return await Operator("launcher", children, printer, needed=needed).run(address, secret)

    ended = asyncio.run(watch())
    end_everything()
    (run_dir / CONTROL).unlink(missing_ok=True)  # a coordinator that was killed could not
    if ended.code >= 128:
        record_interruption(run_dir, ended.reason)
    for line in summary_lines(read_final(run_dir), str(run_dir), ended.code, ended.reason):
        printer.line(line)
    return ended.code


def fork_child(main: Callable[[], int], log: Path | None) -> int:
    """Fork a process that runs ``main`` and exits with its result, output to ``log`` (None: ours); returns its pid.

    Call while single-threaded and on the main thread: the child dies with the thread that forked it.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        processes.die_with_parent(parent)
        processes.reset_signals()
        redirect_output(log)
        status = main()
    except BaseException:  # nothing may return into the launcher's stack
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end_everything() -> None:
    """SIGKILL and reap whatever this process still has below it."""
    deadline = time.monotonic() + _END_DEADLINE_S
    while (below := processes.descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in below:
            processes.send_signal(pid, signal.SIGKILL)
        for pid in processes.children(os.getpid()):
            os.waitpid(pid, 0)


def read_final(run_dir: Path) -> dict[str, Any]:
    """final.json, or an empty mapping where there is none."""
    try:
        content: dict[str, Any] = json.loads((run_dir / FINAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


def record_interruption(run_dir: Path, reason: str) -> None:
    """The coordinator died with the job: say in its files that it is over."""
    path = run_dir / STATUS
    try:
        status = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(status | {"state": "interrupted", "reason": reason}, indent=1) + "\n")
        temporary.replace(path)
        now = {"t": time.time(), "mono": time.monotonic(), "event": "job_end"}
        record = now | {"generation": status.get("generation", 0), "node": None, "rank": None, "reason": reason}
        with open(run_dir / EVENTS, "a", encoding="utf-8") as events:
            events.write(json.dumps(record) + "\n")
    except (OSError, ValueError) as error:
        print(f"deadpool: {path}: {error}", file=sys.stderr)
