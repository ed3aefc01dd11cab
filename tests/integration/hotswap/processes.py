"""Watching a job, and hitting its processes, from outside."""

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


def send(pid: int, number: int) -> None:
    """Send a signal."""
    os.kill(pid, number)
