"""What Deadpool does not protect yet, as data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from deadpool_ext.protocol.types import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One thing that cannot be combined with ``--deadpool``: its name, when it is given, and what to do instead."""

    name: str
    given: Callable[[argparse.Namespace], object]
    remedy: str


# Conditions read upstream's parsed arguments, before upstream validates (and rewrites) them.
REFUSALS = (
    Refusal(
        name="--deadpool-snapshot-params",
        given=lambda a: a.deadpool_snapshot_params,
        remedy="leave it out (parameters are rebuilt from the optimizer's fp32 copy)",
    ),
    Refusal(
        name="an optimizer that is not sharded",
        given=lambda a: not a.use_distributed_optimizer,
        remedy="add --use-distributed-optimizer",
    ),
    Refusal(
        name="an optimizer other than Adam",
        given=lambda a: a.optimizer != "adam",
        remedy="use --optimizer adam",
    ),
    Refusal(
        name="--use-layer-wise-distributed-optimizer",
        given=lambda a: getattr(a, "use_layer_wise_distributed_optimizer", False),
        remedy="leave it out",
    ),
    Refusal(
        name="--num-distributed-optimizer-instances above 1",
        given=lambda a: a.num_distributed_optimizer_instances > 1,
        remedy="leave it out",
    ),
    Refusal(
        name="--use-precision-aware-optimizer",
        given=lambda a: a.use_precision_aware_optimizer,
        remedy="leave it out (the fp32 state is what is copied)",
    ),
    Refusal(
        name="--optimizer-cpu-offload",
        given=lambda a: a.optimizer_cpu_offload,
        remedy="leave it out",
    ),
    Refusal(
        name="--use-megatron-fsdp",
        given=lambda a: a.use_megatron_fsdp,
        remedy="use --use-distributed-optimizer",
    ),
    Refusal(
        name="--use-torch-fsdp2",
        given=lambda a: a.use_torch_fsdp2,
        remedy="use --use-distributed-optimizer",
    ),
    Refusal(
        name="--inprocess-restart",
        given=lambda a: a.inprocess_restart,
        remedy="leave it out (both would act on a failure)",
    ),
    Refusal(
        name="a mixture of experts (--num-experts)",
        given=lambda a: a.num_experts is not None or a.expert_model_parallel_size > 1,
        remedy="train a dense model",
    ),
    Refusal(
        name="--context-parallel-size above 1",
        given=lambda a: a.context_parallel_size > 1,
        remedy="use --context-parallel-size 1 and more tensor or pipeline parallelism",
    ),
    Refusal(
        name="training in fp8 or fp4",
        given=lambda a: a.fp8 or a.fp4,
        remedy="use --bf16",
    ),
    Refusal(
        name="--async-save",
        given=lambda a: a.async_save,
        remedy="leave it out",
    ),
    Refusal(
        name="--dataloader-type external",
        given=lambda a: a.dataloader_type == "external",
        remedy="use --dataloader-type single or cyclic",
    ),
    Refusal(
        name="--freeze-all-layers",
        given=lambda a: a.freeze_all_layers,
        remedy="leave it out",
    ),
    Refusal(
        name="--skip-train",
        given=lambda a: a.skip_train,
        remedy="run it without --deadpool (nothing changes that could be lost)",
    ),
    Refusal(
        name="a CUDA graph",
        given=lambda a: (
            a.cuda_graph_impl != "none" or a.enable_cuda_graph or a.external_cuda_graph or a.optimizer_cuda_graph
        ),
        remedy="leave out --cuda-graph-impl (a graph holds the communicators that a recovery replaces)",
    ),
    Refusal(
        name="--rerun-mode report_stats",
        given=lambda a: a.rerun_mode == "report_stats",
        remedy="leave it out",
    ),
    Refusal(
        name="--enable-ft-package",
        given=lambda a: a.enable_ft_package,
        remedy="leave it out (both would act on a failure)",
    ),
    Refusal(
        name="--adlr-autoresume",
        given=lambda a: a.adlr_autoresume,
        remedy="leave it out",
    ),
    Refusal(
        name="--use-sharp",
        given=lambda a: a.use_sharp,
        remedy="leave it out",
    ),
    Refusal(
        name="--phase-transition-iterations",
        given=lambda a: a.phase_transition_iterations,
        remedy="leave it out",
    ),
    Refusal(
        name="--tp-comm-overlap",
        given=lambda a: a.tp_comm_overlap,
        remedy="leave it out (its buffers hold the communicators that a recovery replaces)",
    ),
    Refusal(
        name="--use-nccl-ub",
        given=lambda a: a.nccl_ub,
        remedy="leave it out (its memory is registered with the communicators that a recovery replaces)",
    ),
    Refusal(
        name="--tensor-parallel-num-weight-shards above the tensor-parallel size",
        given=lambda a: (a.tensor_parallel_num_weight_shards or 1) > a.tensor_model_parallel_size,
        remedy="leave it out",
    ),
    Refusal(
        name="--qk-clip",
        given=lambda a: a.qk_clip,
        remedy="leave it out (it changes weights after the optimizer step, when they are being copied)",
    ),
    Refusal(
        name="--full-validation",
        given=lambda a: a.full_validation,
        remedy="give --eval-iters",
    ),
    Refusal(
        name="--multiple-validation-sets",
        given=lambda a: a.multiple_validation_sets,
        remedy="use one validation set",
    ),
    Refusal(
        name="--non-persistent-ckpt-type local",
        given=lambda a: a.non_persistent_ckpt_type == "local",
        remedy="leave it out (Deadpool keeps such copies), or use the type global",
    ),
)


def check(args: argparse.Namespace) -> None:
    """Raise :class:`UsageError` for the first refusal that ``args`` (parsed, not yet validated) meets."""
    for refusal in REFUSALS:
        if refusal.given(args):
            raise UsageError(f"{refusal.name} is not supported with --deadpool yet: {refusal.remedy}")


def check_data_parallel(size: int) -> None:
    """Refuse a data-parallel size of 1: no rank would have a peer with the same shard to lean on."""
    if size < 2:
        raise UsageError(
            "a data-parallel size of 1 is not supported with --deadpool yet: start twice as many ranks, "
            "or halve --tensor-model-parallel-size or --pipeline-model-parallel-size"
        )
