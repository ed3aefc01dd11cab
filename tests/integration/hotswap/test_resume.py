"""A protected job that was resumed from a durable checkpoint; its newcomers read nothing from disk."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from tests.integration.hotswap.judging import assert_recovered
from tests.integration.hotswap.processes import steps_recorded, until
from tests.jobs import Ended, Job, JobServer


def test_the_checkpoint_may_be_gone_when_a_node_dies(
    jobs: JobServer, arguments: Callable[..., list[str]], run_dir: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    whole = {"train_iters": 12, "save_interval": 3}
    first = jobs.run(
        Job(
            run_dir=tmp_path / "first",
            argv=[*arguments("bf16_overlaps", **whole, exit_interval=3, save=str(saved)), "--deadpool"],
        )
    )
    assert first.code == 0, first.output
    resumed = [*arguments("bf16_overlaps", **whole, load=str(saved)), "--deadpool"]
    calm = jobs.run(Job(run_dir=tmp_path / "calm", argv=resumed))
    assert calm.code == 0, calm.output
    assert [step["iteration"] for step in calm.steps()] == list(range(4, 13))

    result: list[Ended] = []
    job = Job(run_dir=run_dir, argv=resumed, spares=1, faults=("kill-node:node=n2,step=10,phase=backward",))
    thread = threading.Thread(target=lambda: result.append(jobs.run(job)))
    thread.start()
    until(lambda: steps_recorded(run_dir) >= 1, "a step")
    shutil.rmtree(saved)
    thread.join()
    assert_recovered(result[0], calm, failures=1)
