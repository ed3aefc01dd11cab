"""A node is killed at any place of a step; a spare takes over; the trajectory is the same, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.hotswap.conftest import ITERATIONS, VARIANTS
from tests.integration.hotswap.judging import assert_recovered, assert_survivors_kept_their_processes, seats_of
from tests.integration.hotswap.table import note
from tests.jobs import Ended, Job, JobServer

NODES = ("n0", "n1", "n2", "n3")
PHASES = ("data", "forward", "backward", "grad_sync", "optimizer", "d2h", "h2h", "gate", "post_step")
FIRST, SECOND = 3, 5  # the iterations in which nodes are killed; the second may fall into the replay of the first


def pairwise() -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Runs of (variant, (node, phase), (node, phase)), two swaps each, that cover every pair of node, phase, variant.

    Every (node, phase) is in exactly one run; walking the nodes against the phases puts both variants to each node
    and each phase.
    """
    hits = [(node, phase) for number, phase in enumerate(PHASES) for node in NODES[number % 4 :] + NODES[: number % 4]]
    half = len(hits) // 2
    runs = []
    for number, (first, second) in enumerate(zip(hits[:half], hits[half:], strict=True)):
        variant = tuple(VARIANTS)[(number + number // 2) % 2]
        if first[0] == second[0]:  # the first swap emptied that node: take its neighbour, which keeps the cover
            second = (NODES[(NODES.index(second[0]) + 1) % 4], second[1])
        runs.append((variant, first, second))
    return runs


def all_combinations() -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Every variant x node x phase as the first hit, with another node and phase as the second."""
    runs = []
    for variant, node, phase in itertools.product(VARIANTS, NODES, PHASES):
        other = NODES[(NODES.index(node) + 1 + PHASES.index(phase) % 3) % 4]
        runs.append((variant, (node, phase), (other, PHASES[(PHASES.index(phase) + 4) % len(PHASES)])))
    return runs


def name(run: tuple[str, tuple[str, str], tuple[str, str]]) -> str:
    """Readable test id."""
    return f"{run[0]}-{'.'.join(run[1])}-{'.'.join(run[2])}"


CASES = [pytest.param(run, id=name(run)) for run in pairwise()]
CASES += [
    pytest.param(run, id=name(run), marks=pytest.mark.slow) for run in all_combinations() if run not in pairwise()
]


@pytest.mark.parametrize("run", CASES)
def test_two_nodes_killed_in_one_run(
    run: tuple[str, tuple[str, str], tuple[str, str]],
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
) -> None:
    variant, (first_node, first_phase), (second_node, second_phase) = run
    faults = (
        f"kill-node:node={first_node},step={FIRST},phase={first_phase}",
        f"kill-node:node={second_node},step={SECOND},phase={second_phase}",
    )
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments(variant), "--deadpool"], spares=2, faults=faults))
    assert_recovered(ended, undisturbed(variant), failures=2)
    assert len(ended.events("fault_injected")) == 2
    assert_survivors_kept_their_processes(ended, seats_of(first_node) | seats_of(second_node))
    note(ended, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_a_random_time(
    variant: str,
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
    seed: int,
) -> None:
    chance = random.Random(seed)
    calm = undisturbed(variant)
    length = sum(step["step_seconds"] for step in calm.steps())
    node, after = chance.choice(NODES), chance.uniform(0.0, 0.8 * length)
    fault = f"kill-node:node={node},after={after:.3f}"
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments(variant), "--deadpool"], spares=1, faults=(fault,)))
    assert_recovered(ended, calm, failures=1)
    assert_survivors_kept_their_processes(ended, seats_of(node))


def test_a_second_node_dies_while_the_first_is_being_replaced(
    jobs: JobServer, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], run_dir: Path
) -> None:
    faults = (
        f"kill-node:node=n0,step={FIRST},phase=backward",
        f"kill-node:node=n2,step={FIRST - 1},phase=recovery",  # at the restore of the version before
    )
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments("fp32_dropout"), "--deadpool"], spares=2, faults=faults))
    assert_recovered(ended, undisturbed("fp32_dropout"), failures=2)
    assert_survivors_kept_their_processes(ended, seats_of("n0") | seats_of("n2"))


@pytest.mark.parametrize(
    "fault",
    [
        f"kill-node:node=n3,step={ITERATIONS},phase=post_step",
        "kill-node:node=n1,step=4,phase=eval",
        "kill-node:node=n3,step=4,phase=save",
        f"kill-node:node=n2,step={ITERATIONS},phase=eval",
        f"kill-node:node=n0,step={ITERATIONS},phase=save",
    ],
    ids=["last_iteration", "evaluation", "save", "evaluation_after_training", "save_after_training"],
)
def test_killed_beside_the_training_step(
    fault: str,
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
    tmp_path: Path,
) -> None:
    """In evaluation, in a save, and so late that only evaluation and save after training are left."""
    extra = {"eval_interval": 4, "eval_iters": 1, "split": "90,5,5", "save_interval": 4, "ckpt_format": "torch_dist"}
    calm = undisturbed("bf16_overlaps", **extra, save=False)
    argv = [*arguments("bf16_overlaps", **extra, save=str(tmp_path / "checkpoints")), "--deadpool"]
    ended = jobs.run(Job(run_dir=run_dir, argv=argv, spares=1, faults=(fault,)))
    assert_recovered(ended, calm, failures=1)
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == str(ITERATIONS)
