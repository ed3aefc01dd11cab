"""The health checks of one node, run by its agent: built in ones, and the user's own script.

A *fatal* finding means that the node should not train: it is replaced if a spare is there. Anything else that is found
is a warning. A check is a function of :class:`Surroundings`; :data:`CHECKS` lists them. They run one after the other on
a helper thread, each in milliseconds, the user's script within its own limit.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deadpool_ext.control.gpus import Gpus
from deadpool_ext.protocol.messages import Finding

LOW_MEMORY_BYTES: Final = 256 << 20
LOW_DISK_BYTES: Final = 64 << 20
SCRIPT_SECONDS: Final = 5.0
_LAST_CHARS: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What checks look at. ``script``: the user's command, run by a shell; empty: none."""

    node: str
    log_dir: str = ""
    script: str = ""
    meminfo: Path = Path("/proc/meminfo")
    gpus: Gpus | None = None


Check = Callable[[Surroundings], Finding]


def check_memory(around: Surroundings) -> Finding:
    """Host memory that is left, the control group's limit included."""
    left = _available_bytes(around.meminfo)
    ok = left is None or left >= LOW_MEMORY_BYTES
    return Finding(check="memory", ok=ok, detail="" if ok or left is None else f"only {left >> 20} MB of memory left")


def check_disk(around: Surroundings) -> Finding:
    """Space where this node writes its logs."""
    if not around.log_dir:
        return Finding(check="disk", ok=True)
    try:
        free = shutil.disk_usage(around.log_dir).free
    except OSError as error:
        return Finding(check="disk", ok=False, detail=f"{around.log_dir}: {error.strerror}")
    ok = free >= LOW_DISK_BYTES
    return Finding(check="disk", ok=ok, detail="" if ok else f"only {free >> 20} MB left at {around.log_dir}")


def check_gpu(around: Surroundings) -> Finding:
    """Every GPU answers, reported no critical error, and has no uncorrectable one in its memory. Asks the driver."""
    problem = around.gpus.problem() if around.gpus is not None else None
    if problem is None:
        return Finding(check="gpu", ok=True)
    fatal, detail = problem
    return Finding(check="gpu", ok=False, fatal=fatal, detail=detail)


def check_script(around: Surroundings) -> Finding:
    """The user's script: exit code 0 within its limit means healthy."""
    if not around.script:
        return Finding(check="script", ok=True)
    environment = os.environ | {"DEADPOOL_NODE": around.node}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", around.script],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SCRIPT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _script_failed(around, f"not done within {SCRIPT_SECONDS:g} s")
    except OSError as error:
        return _script_failed(around, str(error))
    if done.returncode == 0:
        return Finding(check="script", ok=True)
    said = done.stdout.decode(errors="replace").strip().splitlines()
    return _script_failed(around, f"exit code {done.returncode}{': ' + said[-1][:_LAST_CHARS] if said else ''}")


def _script_failed(around: Surroundings, how: str) -> Finding:
    name = os.path.basename(shlex.split(around.script)[0]) if around.script.strip() else around.script
    return Finding(check="script", ok=False, fatal=True, detail=f"{name}: {how}")


#: All checks, in the order in which they run. Add one here.
CHECKS: tuple[Check, ...] = (check_memory, check_disk, check_gpu, check_script)


def run_checks(around: Surroundings, checks: tuple[Check, ...] = CHECKS) -> tuple[tuple[Finding, ...], float]:
    """Run the checks; returns what they found and the seconds that took. A check that raises is a finding."""
    began = time.monotonic()
    findings = []
    for check in checks:
        try:
            findings.append(check(around))
        except (OSError, ValueError, RuntimeError) as error:
            name = check.__name__.removeprefix("check_")
            findings.append(Finding(check=name, ok=False, detail=f"the check itself failed: {error!r}"))
    return tuple(findings), time.monotonic() - began


class OomWatch:
    """Counts processes that the kernel killed for lack of memory in this node's control group."""

    def __init__(self, events: Path | None = None) -> None:
        self._events = events if events is not None else _memory_events()
        self._seen = self._count()

    def more(self) -> bool:
        """Whether the kernel killed one since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        if self._events is None:
            return 0
        try:
            lines = self._events.read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _memory_events() -> Path | None:
    """memory.events of this process's control group (version 2), or the whole machine's counter."""
    try:
        path = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition("::")[2]
    except OSError:
        return None
    for candidate in (Path("/sys/fs/cgroup" + path) / "memory.events", Path("/proc/vmstat")):
        if candidate.exists():
            return candidate
    return None


def _available_bytes(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None
