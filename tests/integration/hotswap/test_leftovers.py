"""However a job with the real trainer ends, nothing of it is left: no process, no shared memory, no listener."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.hotswap.processes import of_any_job, until
from tests.jobs import Job, JobServer


def listeners() -> set[str]:
    """Inodes of listening TCP sockets on this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    return {line.split()[9] for line in lines if line.split()[3] == "0A"}


@pytest.mark.parametrize("how", ["finished", "interrupted", "launcher_killed"])
def test_nothing_is_left(
    how: str, jobs: JobServer, arguments: Callable[..., list[str]], run_dir: Path, tmp_path: Path
) -> None:
    before_memory, before_listeners = set(os.listdir("/dev/shm")), listeners()
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
    until(lambda: not of_any_job(), "all processes gone", seconds=10.0)
    until(lambda: listeners() <= before_listeners, "all listeners gone", seconds=10.0)
    assert set(os.listdir("/dev/shm")) <= before_memory
