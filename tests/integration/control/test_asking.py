"""Commands that ask a running job, from its run directory alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import threading
from pathlib import Path

import pytest

from deadpool_ext.cli.main import run as deadpool
from deadpool_ext.control.coordinator_server import CoordinatorServer, CoordinatorStart, listen
from deadpool_ext.control.rundir import CONTROL, prepare_run_directory
from deadpool_ext.control.wire import new_secret
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.messages import JobSpec


class Served:
    """A coordinator that waits for its nodes, on a thread."""

    def __init__(self, run_dir: Path) -> None:
        layout = plain_layout(ranks_per_node=1, tensor_parallel=1, data_parallel=2, pipeline_parallel=1)
        job = JobSpec(job_id="j", argv=("x",), cwd="/", env={}, layout=layout)
        self.secret = new_secret()
        self._start = CoordinatorStart(
            config=CoordinatorConfig(job=job, nodes=2),
            run_dir=prepare_run_directory(run_dir),
            listener=listen("127.0.0.1"),
            secret=self.secret,
        )
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._up.wait(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = CoordinatorServer(self._start)
        self._task = asyncio.ensure_future(server.run())
        await asyncio.sleep(0.05)
        self._up.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def end(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)


def test_a_job_is_asked_and_answers_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = Served(tmp_path / "run")
    try:
        control = tmp_path / "run" / CONTROL
        assert stat.S_IMODE(control.stat().st_mode) == 0o600
        assert deadpool(["inject", str(tmp_path / "run"), "kill-rank:rank=1,step=3"]) == 0
        assert capsys.readouterr().out == "kill-rank on rank 1 in step 3, forward\n"
        assert deadpool(["inject", str(tmp_path / "run"), "kill-rank:rank=7,step=3"]) == 2
        assert "no rank 7; ranks: 0 to 1" in capsys.readouterr().err
        assert deadpool(["inject", str(tmp_path / "run"), "melt-node:node=n1"]) == 2
        content = json.loads(control.read_text())
        told = capsys.readouterr()
        assert content["secret"] not in told.out + told.err
    finally:
        served.end()
    assert not control.exists()
    assert deadpool(["inject", str(tmp_path / "run"), "kill-rank:rank=1,step=3"]) == 2
    assert "the job is over" in capsys.readouterr().err


def test_a_directory_of_no_job_and_a_job_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deadpool(["inject", str(tmp_path), "kill-rank:rank=1,step=3"]) == 2
    assert "no run directory of a protected job" in capsys.readouterr().err
    with listen("127.0.0.1") as gone:
        port = gone.getsockname()[1]
    (tmp_path / CONTROL).write_text(json.dumps({"host": "127.0.0.1", "port": port, "secret": "00" * 32}))
    assert deadpool(["inject", str(tmp_path), "kill-rank:rank=1,step=3"]) == 1
    assert "the job is not running" in capsys.readouterr().err
