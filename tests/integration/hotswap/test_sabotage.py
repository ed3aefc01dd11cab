"""The comparison is not vacuous: with one restore or reset left out, the disturbed run is no longer the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deadpool_ext.rundir.compare import RunRecordError
from megatron.hotswap.runtime import SABOTAGE_VARIABLE
from tests.integration.hotswap.judging import difference
from tests.jobs import Ended, Job, JobServer

#: (what is left out, variant in which it matters, fault that brings it to light)
LEFT_OUT = [
    ("rng", "fp32_dropout", "kill-node:node=n2,step=3,phase=backward"),
    ("exp_avg_sq", "fp32_dropout", "kill-node:node=n2,step=3,phase=backward"),
    ("cursor", "fp32_dropout", "kill-node:node=n2,step=3,phase=backward"),
    ("optimizer", "fp32_dropout", "kill-node:node=n2,step=3,phase=backward"),
    ("parameters", "bf16_overlaps", "kill-node:node=n2,step=3,phase=backward"),
    ("config_callbacks", "bf16_overlaps", "kill-node:node=n2,step=3,phase=backward"),
    # Nobody replaced: a newcomer would run the forward pass that the others skip, and all would hang to their timeout.
    ("rerun", "fp32_dropout", "drop-connection:rank=3,step=3,phase=backward"),
]


@pytest.mark.parametrize(("left_out", "variant", "fault"), LEFT_OUT, ids=[case[0] for case in LEFT_OUT])
def test_without_it_the_runs_differ(
    left_out: str,
    variant: str,
    fault: str,
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
) -> None:
    job = Job(
        run_dir=run_dir,
        argv=[*arguments(variant), "--deadpool"],
        spares=1,
        faults=(fault,),
        environment={SABOTAGE_VARIABLE: left_out},
        deadlines={"construct_s": 30.0, "rebuild_s": 20.0, "collective_grace_s": 0.3},
    )
    ended = jobs.run(job)
    assert any("sabotaged" in event.get("text", "") for event in ended.events("warning"))
    try:
        found = difference(ended, undisturbed(variant))
    except RunRecordError:
        found = "no result"
    # Where it makes the trainer raise, the processes are forked again, and new ones have nothing to reset: the run is
    # right in the end, at the price of a second failure that the undamaged product does not have.
    second = [failure for failure in ended.events("failure_detected") if failure["kind"] == "worker_exited"]
    assert found is not None or second
    assert ended.code != 0 or found != "no result"
