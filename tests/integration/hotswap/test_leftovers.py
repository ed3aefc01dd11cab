"""However a job with the real trainer ends, nothing of it is left: no process, no port, no shared memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.hotswap.processes import until
from tests.jobs import Job, JobServer


@pytest.mark.parametrize("how", ["finished", "interrupted", "launcher_killed"])
def test_f21_nothing_is_left(
    how: str, jobs: JobServer, arguments: Callable[..., list[str]], run_dir: Path, tmp_path: Path
) -> None:
    before_memory = set(os.listdir("/dev/shm"))
    fault = ("kill-node:node=n1,step=3,phase=save",) if how == "finished" else ()
    ended = jobs.run(
        Job(
            run_dir=run_dir,
            # A save spawns helpers of upstream's own: they must go with their rank too.
            argv=[*arguments("fp32_dropout", save=str(tmp_path / "saved"), save_interval=3), "--deadpool"],
            spares=1,
            faults=fault,
            interrupt_after_step=None if how == "finished" else 4,
            interrupt_with=signal.SIGKILL if how == "launcher_killed" else signal.SIGINT,
        )
    )
    assert ended.code == {"finished": 0, "interrupted": 128 + signal.SIGINT, "launcher_killed": -signal.SIGKILL}[how]
    # Listeners go with their processes, and so do arenas, which have no name.
    until(lambda: not jobs.processes(), "all processes gone", seconds=10.0)
    until(lambda: set(os.listdir("/dev/shm")) <= before_memory, "no shared memory left", seconds=10.0)
