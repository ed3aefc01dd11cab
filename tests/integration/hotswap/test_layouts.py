"""Every layout and option that changes what a step does or what its state is: a node is lost, the run is the same."""

from __future__ import annotations

import re
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
#: Stands for a directory of the run's own.
DIRECTORY = "@"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and where in it nodes (``n0,3,backward``) and processes (``rank 0,3,backward``) are killed."""

    nodes: int
    ranks_per_node: int
    faults: tuple[str, ...]  # who, step, phase
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
    "dp3_cyclic_loader_processes": Case(
        nodes=3,
        ranks_per_node=1,
        faults=("n2,3,grad_sync", "rank 0,4,forward"),
        options=layout(1, 1)
        | EVALUATION
        | {"global_batch_size": 12, "dataloader_type": "cyclic", "num_workers": 1}
        | {"log_params_norm": True, "log_num_zeros_in_grad": True, "check_weight_hash_across_dp_replicas_interval": 2}
        | {"eval_global_batch_size": 6, "manual_gc": True},
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
    # A save where the batch grows, one where the job is left early.
    "growing_batch_by_samples": Case(
        nodes=4,
        ranks_per_node=1,
        faults=("n3,4,save", "n0,6,post_step"),
        options=layout(1, 2)
        | {"train_iters": False, "train_samples": 64, "lr_warmup_iters": False, "lr_warmup_samples": 8}
        | {"global_batch_size": False, "step_batch_size_schedule": "0:4 1024:8 2048:16"}
        | {"save": DIRECTORY, "save_interval": 100, "exit_interval": 7},
    ),
}
SLOW_CASES = {
    "sequence_parallel_full_recompute_bf16": Case(
        nodes=2,
        ranks_per_node=2,
        faults=("n1,3,backward", "rank 0,4,forward"),
        variant="bf16_overlaps",
        options=layout(2, 1)
        | FULL_RECOMPUTE
        | {"sequence_parallel": True, "calculate_per_token_loss": True, "grad_reduce_in_bf16": True}
        | {"ddp_bucket_size": 20000, "decoupled_lr": 2e-3, "decoupled_min_lr": 1e-4, "log_throughput": True},
    ),
    "torch_save_at_the_failing_step_exit_interval": Case(
        nodes=2,
        ranks_per_node=2,
        faults=("n1,2,save",),
        options=layout(2, 1)
        | {"save": DIRECTORY, "save_interval": 2, "ckpt_format": "torch"}
        | {"exit_interval": 4, "exit_duration_in_mins": 60},
    ),
    "save_without_optimizer": Case(
        nodes=2,
        ranks_per_node=2,
        faults=("n0,2,save",),
        options=layout(2, 1)
        | {"save": DIRECTORY, "save_interval": 2, "ckpt_format": "torch_dist"}
        | {"no_save_optim": True, "no_save_rng": True, "exit_interval": 4},
    ),
    "non_persistent_save": Case(
        nodes=2,
        ranks_per_node=1,
        faults=("n1,3,backward",),
        options=layout(1, 1)
        | {"save": DIRECTORY, "save_interval": 100, "non_persistent_save_interval": 2}
        | {"non_persistent_ckpt_type": "global", "ckpt_format": "torch_dist", "log_progress": True},
    ),
    "data_before_pipeline_mock_data": Case(
        nodes=4,
        ranks_per_node=1,
        faults=("n2,3,forward",),
        options=layout(1, 2)
        | {"use_tp_pp_dp_mapping": True, "mock_data": True, "data_path": False, "global_batch_size": 16}
        | {"disable_gloo_process_groups": True},
    ),
    "multi_token_prediction": Case(
        nodes=4,
        ranks_per_node=1,
        faults=("n1,3,backward", "n3,4,optimizer"),
        variant="bf16_overlaps",
        options=layout(1, 2) | {"mtp_num_layers": 1},
    ),
    "iterations_left_out": Case(
        nodes=2,
        ranks_per_node=1,
        faults=("n1,4,backward",),
        options=layout(1, 1) | {"iterations_to_skip": 3, "train_iters": 6},
    ),
    "saved_activations_distributed": Case(
        nodes=2,
        ranks_per_node=2,
        faults=("n1,3,backward",),
        options=layout(2, 1)
        | FULL_RECOMPUTE
        | {"distribute_saved_activations": True, "use_cpu_initialization": True, "global_batch_size": 16},
    ),
}
ALL = [pytest.param(name, id=name) for name in CASES]
ALL += [pytest.param(name, id=name, marks=pytest.mark.slow) for name in SLOW_CASES]


def evaluations(ended: Ended) -> dict[str, str]:
    """What upstream printed of each evaluation, the last time; by its own words for when that was."""
    found = {}
    for log in sorted(ended.job.run_dir.glob("logs/*/*.log"), key=lambda path: path.stat().st_mtime):
        for when, what in re.findall(r"validation loss at (.*?) \| (.*)", log.read_text(errors="replace")):
            found[when] = what
    return found


def spec(fault: str) -> str:
    """``who,step,phase`` as the command line takes it."""
    who, step, phase = fault.split(",")
    victim = f"kill-rank:rank={who.removeprefix('rank ')}" if who.startswith("rank") else f"kill-node:node={who}"
    return f"{victim},step={step},phase={phase}"


def seats(fault: str, ranks_per_node: int) -> set[int]:
    """Seats whose processes are lost by it."""
    who = fault.split(",")[0]
    return {int(who.removeprefix("rank "))} if who.startswith("rank") else seats_of(who, ranks_per_node)


@pytest.mark.parametrize("name", ALL)
def test_a_node_is_lost(
    name: str,
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
    tmp_path: Path,
) -> None:
    case = (CASES | SLOW_CASES)[name]
    options = {"train_iters": 5} | case.options

    def in_directory(called: str) -> dict[str, Any]:
        place = str(tmp_path / called)
        return {key: place if value == DIRECTORY else value for key, value in options.items()}

    calm = undisturbed(case.variant, case.nodes, case.ranks_per_node, **in_directory("undisturbed"))
    ended = jobs.run(
        Job(
            run_dir=run_dir,
            argv=[*arguments(case.variant, **in_directory("disturbed")), "--deadpool"],
            nodes=case.nodes,
            ranks_per_node=case.ranks_per_node,
            spares=sum(fault.startswith("n") for fault in case.faults),
            faults=tuple(spec(fault) for fault in case.faults),
        )
    )
    assert_recovered(ended, calm, failures=len(case.faults))
    assert evaluations(ended) == evaluations(calm)
    assert bool(evaluations(calm)) == ("eval_interval" in options)
    assert_survivors_kept_their_processes(ended, set().union(*(seats(f, case.ranks_per_node) for f in case.faults)))
