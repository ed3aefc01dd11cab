"""Every layout and option that changes what a step does or what its state is: a node is lost, the run is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hotswap.judging import assert_recovered, assert_survivors_kept_their_processes, seats_of
from tests.jobs import Ended, Job, JobServer

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EVALUATION = {"eval_interval": 2, "eval_iters": 1, "split": "90,5,5"}
#: The first three steps overflow; after two good ones the scale grows again.
FP16 = {"fp16": True, "initial_loss_scale": 131072, "hysteresis": 2, "loss_scale_window": 2, "train_iters": 8}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and where in it nodes are killed, one after the other."""

    nodes: int
    ranks_per_node: int
    faults: tuple[str, ...]  # node, step, phase
    options: dict[str, Any]
    variant: str = "fp32_dropout"


def layout(tensor: int, pipeline: int) -> dict[str, Any]:
    """The two sizes that are given; the data-parallel size is what is left."""
    return {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}


CASES = {
    "dp4_accumulation_unclipped": Case(
        nodes=2,
        ranks_per_node=2,
        faults=("n0,3,backward",),
        options=layout(1, 1) | {"micro_batch_size": 1, "global_batch_size": 12, "clip_grad": 0.0},
    ),
    "tp1_pp2_dp3_full_recompute": Case(
        nodes=3,
        ranks_per_node=2,
        faults=("n0,3,backward",),
        options=layout(1, 2) | {"global_batch_size": 12} | FULL_RECOMPUTE,
    ),
    "tp2_dp2_sequence_parallel_selective_recompute": Case(
        nodes=2,
        ranks_per_node=2,
        faults=("n1,3,backward",),
        variant="bf16_overlaps",
        options=layout(2, 1) | {"sequence_parallel": True, "recompute_granularity": "selective"},
    ),
    "fp16_skipped_steps": Case(
        nodes=2,
        ranks_per_node=2,
        faults=("n0,2,backward", "n1,3,d2h"),
        options=layout(2, 1) | FP16,
    ),
    "virtual_pipeline": Case(
        nodes=4,
        ranks_per_node=1,
        faults=("n3,3,backward", "n0,4,eval"),
        options=layout(1, 2) | {"num_layers_per_virtual_pipeline_stage": 1} | EVALUATION,
    ),
    "virtual_pipeline_overlaps": Case(
        nodes=4,
        ranks_per_node=1,
        faults=("n1,3,backward", "n3,4,forward"),
        variant="bf16_overlaps",
        options=layout(1, 2) | {"num_layers_per_virtual_pipeline_stage": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_node_is_lost(
    name: str,
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
) -> None:
    case = CASES[name]
    options = {"train_iters": 5} | case.options
    calm = undisturbed(case.variant, case.nodes, case.ranks_per_node, **options)
    hits = [fault.split(",") for fault in case.faults]
    ended = jobs.run(
        Job(
            run_dir=run_dir,
            argv=[*arguments(case.variant, **options), "--deadpool"],
            nodes=case.nodes,
            ranks_per_node=case.ranks_per_node,
            spares=len(hits),
            faults=tuple(f"kill-node:node={node},step={step},phase={phase}" for node, step, phase in hits),
        )
    )
    assert_recovered(ended, calm, failures=len(hits))
    lost: set[int] = set()
    for node, _, _ in hits:
        lost |= seats_of(node, case.ranks_per_node)
    assert_survivors_kept_their_processes(ended, lost)
