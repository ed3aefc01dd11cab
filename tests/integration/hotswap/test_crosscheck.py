"""Parameters are compared over the data-parallel groups: nothing is disturbed, and a flipped bit is somebody's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.hotswap.judging import assert_recovered, assert_survivors_kept_their_processes, seats_of
from tests.jobs import Ended, Job, JobServer

# Ranks 0 and 2 are a data-parallel group, and so are 1 and 3, 4 and 6, 5 and 7.
EVERY = "--deadpool-check-params-every=1"
SWAP = "--deadpool-on-mismatch=swap"


def found(ended: Ended) -> list[tuple[list[int], list[int], int]]:
    """(group, deviating ranks, version) of every difference."""
    differences = [event for event in ended.events("corruption_detected") if event.get("kind") == "parameters"]
    return [(event["group"], event["deviating"], event["version"]) for event in differences]


def test_a_flipped_model_parameter_is_named_and_nothing_else(
    jobs: JobServer, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], run_dir: Path
) -> None:
    """Every iteration is checked, with parameters gathered in the background; only one is different in one copy. The
    next gather overwrites it: the numbers are those of a run without checks and without a flip."""
    job = Job(
        run_dir=run_dir,
        argv=[*arguments("bf16_overlaps"), "--deadpool", EVERY],
        faults=("corrupt-param:rank=2,step=4,phase=gate",),
    )
    ended = jobs.run(job)
    assert_recovered(ended, undisturbed("bf16_overlaps"), failures=0)
    assert found(ended) == [([0, 2], [2], 3)]
    assert ended.final()["generations"] == 1


@pytest.mark.parametrize(("variant", "spares"), [("fp32_dropout", 1), ("bf16_overlaps", 0)])
def test_a_flipped_main_parameter_is_taken_back(
    variant: str,
    spares: int,
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
) -> None:
    """The rank's optimizer state is not what it had sealed: its node is replaced, if a spare is there, and nobody of
    its group keeps what it has."""
    job = Job(
        run_dir=run_dir,
        argv=[*arguments(variant), "--deadpool", EVERY, SWAP],
        spares=spares,
        faults=("corrupt-main:rank=2,step=4,phase=gate",),
    )
    ended = jobs.run(job)
    assert_recovered(ended, undisturbed(variant), failures=1)
    assert found(ended) == [([0, 2], [2], 3)]
    assert [plan["version"] for plan in ended.events("plan")] == [3]
    assert [event["node"] for event in ended.events("node_lost")] == ["n1"] * spares
    (verdict,) = ended.events("failure_classified")
    assert verdict["evidence"] == "parameters differ"
    assert_survivors_kept_their_processes(ended, seats_of("n1") if spares else set())
