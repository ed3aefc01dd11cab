"""Leaving the trainer in the middle of a step on every rank, with no process lost, and entering it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.hotswap.conftest import VARIANTS
from tests.integration.hotswap.judging import assert_recovered, assert_survivors_kept_their_processes, seats_of
from tests.jobs import Ended, Job, JobServer

#: A broken connection with both ends healthy is told from a death by waiting; no death is coming here.
IMPATIENT = {"collective_grace_s": 0.3}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "phases", [("forward", "backward"), ("grad_sync", "optimizer")], ids=["forward-backward", "grad_sync-optimizer"]
)
def test_interrupted_twice_the_second_time_in_the_first_resumed_step(
    phases: tuple[str, str],
    variant: str,
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
) -> None:
    # On one rank, so that the second place is reached only after the recovery from the first.
    faults = tuple(f"drop-connection:rank=3,step=3,phase={phase}" for phase in phases)
    job = Job(run_dir=run_dir, argv=[*arguments(variant), "--deadpool"], faults=faults, deadlines=IMPATIENT)
    ended = jobs.run(job)
    assert_recovered(ended, undisturbed(variant), failures=2)
    assert len(ended.events("fault_injected")) == 2
    assert ended.final()["generations"] == 3
    assert_survivors_kept_their_processes(ended, replaced=set())


@pytest.mark.parametrize("phase", ["optimizer", "post_step"])
def test_ranks_that_have_stepped_go_back_with_those_that_have_not(
    phase: str, jobs: JobServer, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], run_dir: Path
) -> None:
    """The interruption hits one rank between Adam and the copy to the model, or after the whole step."""
    fault = f"drop-connection:rank=0,step=4,phase={phase}"
    job = Job(run_dir=run_dir, argv=[*arguments("bf16_overlaps"), "--deadpool"], faults=(fault,), deadlines=IMPATIENT)
    ended = jobs.run(job)
    assert_recovered(ended, undisturbed("bf16_overlaps"), failures=1)


def test_f19_survivors_one_step_apart_resume_at_one_version(
    jobs: JobServer, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], run_dir: Path
) -> None:
    """One rank is kept within its fourth step, and its replica with it, while others have finished theirs; then a node
    of those is lost.
    """
    faults = ("hold-gil:rank=0,step=4,phase=optimizer,seconds=1.5", "kill-node:node=n3,step=4,phase=d2h")
    job = Job(run_dir=run_dir, argv=[*arguments("fp32_dropout"), "--deadpool"], spares=1, faults=faults)
    ended = jobs.run(job)
    assert_recovered(ended, undisturbed("fp32_dropout"), failures=1)
    left = {event["rank"]: event for event in ended.events("rank_unwound")}
    assert left[0]["dirty"], left
    assert 4 in [event["live"] for event in left.values()], left
    (plan,) = ended.events("plan")
    assert plan["version"] == 3  # the newest that all have finished
    assert_survivors_kept_their_processes(ended, seats_of("n3"))
