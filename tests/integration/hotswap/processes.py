"""Looking at, and hitting, the processes of a job from outside."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

LOOK_AGAIN_S = 0.02


def until(holds: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    """Wait until ``holds()``; raises AssertionError naming ``what`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        select.select([], [], [], LOOK_AGAIN_S)


def steps_recorded(run_dir: Path) -> int:
    """Lines in ``steps.jsonl`` so far."""
    path = run_dir / "steps.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def named(name: str) -> list[int]:
    """Pids of processes with this ``comm`` (agents, replicators and workers name themselves, e.g. ``dp-repl n2``)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if (entry / "comm").read_text().strip() == name:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def of_any_job() -> list[str]:
    """Names of all processes that belong to a Deadpool job on this machine, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                comm = (entry / "comm").read_text().strip()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if state != "Z" and (comm.startswith("dp-") or b"DEADPOOL_WORKER=" in environment):
                found.append(f"{entry.name} {comm}")
    return found


def send(pid: int, number: int) -> None:
    """Send a signal."""
    os.kill(pid, number)
