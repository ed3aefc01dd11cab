"""Watching a job, and hitting its processes, from outside."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.jobs import Ended, Job, JobServer

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


def send(pid: int, number: int) -> None:
    """Send a signal."""
    os.kill(pid, number)


def run_beside(jobs: JobServer, job: Job, orders: Callable[[], None]) -> Ended:
    """Run a job, and carry out ``orders`` on another thread while it runs; an error there is raised afterwards."""
    failures: list[BaseException] = []

    def give() -> None:
        try:
            orders()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=give)
    thread.start()
    try:
        return jobs.run(job)
    finally:
        thread.join()
        if failures:
            raise failures[0]
