"""The table of what is not covered yet, row by row."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from deadpool_ext.protocol.types import UsageError
from megatron.hotswap import refusals

COVERED: dict[str, Any] = {
    "adlr_autoresume": False,
    "async_save": False,
    "context_parallel_size": 1,
    "cuda_graph_impl": "none",
    "dataloader_type": None,
    "deadpool_snapshot_params": False,
    "enable_cuda_graph": False,
    "enable_ft_package": False,
    "expert_model_parallel_size": 1,
    "external_cuda_graph": False,
    "fp4": None,
    "fp8": None,
    "freeze_all_layers": False,
    "full_validation": False,
    "inprocess_restart": False,
    "multiple_validation_sets": False,
    "nccl_ub": False,
    "non_persistent_ckpt_type": "global",
    "num_distributed_optimizer_instances": 1,
    "num_experts": None,
    "optimizer": "adam",
    "optimizer_cpu_offload": False,
    "optimizer_cuda_graph": False,
    "phase_transition_iterations": None,
    "qk_clip": False,
    "rerun_mode": "validate_results",
    "skip_train": False,
    "tensor_model_parallel_size": 2,
    "tensor_parallel_num_weight_shards": None,
    "tp_comm_overlap": False,
    "use_distributed_optimizer": True,
    "use_layer_wise_distributed_optimizer": False,
    "use_megatron_fsdp": False,
    "use_precision_aware_optimizer": False,
    "use_sharp": False,
    "use_torch_fsdp2": False,
}
# One way to meet each row, in the table's order.
NOT_COVERED: tuple[tuple[str, Any], ...] = (
    ("deadpool_snapshot_params", True),
    ("use_distributed_optimizer", False),
    ("optimizer", "muon"),
    ("use_layer_wise_distributed_optimizer", True),
    ("num_distributed_optimizer_instances", 2),
    ("use_precision_aware_optimizer", True),
    ("optimizer_cpu_offload", True),
    ("use_megatron_fsdp", True),
    ("use_torch_fsdp2", True),
    ("inprocess_restart", True),
    ("num_experts", 4),
    ("context_parallel_size", 2),
    ("fp8", "e4m3"),
    ("async_save", True),
    ("dataloader_type", "external"),
    ("freeze_all_layers", True),
    ("skip_train", True),
    ("cuda_graph_impl", "local"),
    ("rerun_mode", "report_stats"),
    ("enable_ft_package", True),
    ("adlr_autoresume", True),
    ("use_sharp", True),
    ("phase_transition_iterations", "10"),
    ("tp_comm_overlap", True),
    ("nccl_ub", True),
    ("tensor_parallel_num_weight_shards", 4),
    ("qk_clip", True),
    ("full_validation", True),
    ("multiple_validation_sets", True),
    ("non_persistent_ckpt_type", "local"),
)


def test_what_is_covered_passes() -> None:
    refusals.check(Namespace(**COVERED))


@pytest.mark.parametrize(
    ("refusal", "given"), list(zip(refusals.REFUSALS, NOT_COVERED, strict=True)), ids=[name for name, _ in NOT_COVERED]
)
def test_each_row_says_what_to_do_instead(refusal: refusals.Refusal, given: tuple[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        refusals.check(Namespace(**{**COVERED, given[0]: given[1]}))
    assert str(caught.value) == f"{refusal.name} is not supported with --deadpool yet: {refusal.remedy}"


def test_a_layout_without_peers_is_refused() -> None:
    refusals.check_data_parallel(2)
    with pytest.raises(UsageError, match="data-parallel size of 1"):
        refusals.check_data_parallel(1)


def test_the_page_on_layouts_names_every_refusal() -> None:
    page = (
        (Path(__file__).parents[3] / "docs" / "layouts.md").read_text(encoding="utf-8").split("## What is refused")[1]
    )
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")][1:]
    named = [row.replace("`", "").strip().partition(" (--cuda")[0] for row in rows]
    assert named[: len(refusals.REFUSALS)] == [refusal.name for refusal in refusals.REFUSALS]
