"""Whole jobs on this machine for tests: one process imports the trainer once, each job is a fork of it.

The jobs are what ``deadpool local`` runs, from its options to its exit code; only the imports are shared.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "pretrain_gpt.py")
JOB_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of ``deadpool local``."""

    run_dir: Path
    argv: list[str]
    script: str = SCRIPT
    nodes: int = 4
    ranks_per_node: int = 2
    spares: int = 0
    faults: tuple[str, ...] = ()
    deadlines: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    interrupt_after_step: int | None = None  # send `interrupt_with` to the launcher once this step is recorded
    interrupt_with: int = signal.SIGINT


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended, and what it left in its run directory."""

    job: Job
    code: int
    output: str

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Lines of ``events.jsonl``, of one kind or all."""
        found = _lines(self.job.run_dir / "events.jsonl")
        return [event for event in found if name is None or event["event"] == name]

    def steps(self) -> list[dict[str, Any]]:
        """Lines of ``steps.jsonl``."""
        return _lines(self.job.run_dir / "steps.jsonl")

    def final(self) -> dict[str, Any]:
        """``final.json``."""
        content: dict[str, Any] = json.loads((self.job.run_dir / "final.json").read_text(encoding="utf-8"))
        return content


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class JobServer:
    """Owns the preloaded process. ``run`` blocks until a job has ended; jobs run one at a time."""

    def __init__(self) -> None:
        # In the environment that every process forked from the server shows in /proc: tells them from anybody else's.
        self.mark = f"DEADPOOL_TEST_JOBS={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.jobs"],
            cwd=ROOT,
            env=os.environ | {name: value},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, job: Job, seconds: float = JOB_SECONDS) -> Ended:
        """Run a job; raises TimeoutError (after killing it with everything below it) when it takes too long."""
        request = {**job.__dict__, "run_dir": str(job.run_dir), "seconds": seconds}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], seconds + 120)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            raise TimeoutError(f"the job server gave no answer for {job.run_dir}")
        code = json.loads(answer)["code"]
        output = job.run_dir.with_suffix(".out").read_text(encoding="utf-8", errors="replace")
        if code is None:
            raise TimeoutError(f"job {job.run_dir} did not end within {seconds:g} s:\n{output[-3000:]}")
        return Ended(job=job, code=code, output=output)

    def processes(self) -> dict[int, str]:
        """Living processes of jobs, by pid, with the names they gave themselves (``dp-repl n2``)."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self._process.pid:
                try:
                    name = (entry / "comm").read_text().strip()
                    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    ours = self.mark.encode() in (entry / "environ").read_bytes()
                except OSError:
                    continue
                if ours and state != "Z":
                    found[int(entry.name)] = name
        return found

    def named(self, name: str) -> int:
        """Pid of the one process of the running job with this name."""
        (pid,) = [pid for pid, given in self.processes().items() if given == name]
        return pid

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait(timeout=30)


def _serve() -> None:
    from deadpool_ext.control.forkserver import preload_modules
    from deadpool_ext.control.launcher import ENVIRONMENT, PRELOAD_PROTECTED

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    preload_modules(PRELOAD_PROTECTED)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_job(request)
        print(json.dumps({"code": _wait(pid, request)}), flush=True)


def _wait(pid: int, request: dict[str, Any]) -> int | None:
    end = time.monotonic() + request["seconds"]
    steps = Path(request["run_dir"]) / "steps.jsonl"
    after = request["interrupt_after_step"]
    descriptor = os.pidfd_open(pid)
    try:
        while time.monotonic() < end:
            if select.select([descriptor], [], [], 0.05)[0]:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if after is not None and steps.exists() and f'"iteration": {after},' in steps.read_text():
                os.kill(pid, request["interrupt_with"])
                after = None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    finally:
        os.close(descriptor)


def _be_job(request: dict[str, Any]) -> None:
    from deadpool_ext.control.processes import die_with_parent, reset_signals
    from deadpool_ext.control.worker import redirect_output

    code = 70
    try:
        die_with_parent(os.getppid())
        reset_signals()
        redirect_output(Path(request["run_dir"]).with_suffix(".out"))
        os.environ.update(request["environment"])
        code = _run(request)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(request: dict[str, Any]) -> int:
    """What the command line does with its options, errors included."""
    from deadpool_ext.cli.main import run

    arguments = ["local", "--run-dir", request["run_dir"]]
    for name in ("nodes", "ranks_per_node", "spares"):
        arguments += [f"--{name.replace('_', '-')}", str(request[name])]
    for fault in request["faults"]:
        arguments += ["--fault", fault]
    for name, value in request["deadlines"].items():
        arguments += ["--deadline", f"{name}={value}"]
    return run([*arguments, "--", request["script"], *request["argv"]])


if __name__ == "__main__":
    _serve()
