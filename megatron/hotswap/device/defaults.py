"""Upstream flags on a CPU: other defaults, and what cannot be had.

A flag that the user gives always wins over these defaults. One that no CPU can honour ends in one line instead of an
error from the depth of upstream.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deadpool_ext.protocol.types import UsageError

DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    # A process that is not the training one, per rank and per loader, is more than the CPU has to give.
    "num_workers": 0,
}


def _attention() -> Any:
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend.unfused


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Change the defaults of upstream's parser in place; to be called after upstream has added its arguments."""
    parser.set_defaults(**DEFAULTS, attention_backend=_attention())


@dataclass(frozen=True, kw_only=True, slots=True)
class Impossible:
    """A parsed flag that needs a GPU, and what to do instead."""

    flag: str
    given: Callable[[argparse.Namespace], bool]
    remedy: str


IMPOSSIBLE = (
    Impossible(
        flag="--transformer-impl transformer_engine",
        given=lambda a: a.transformer_impl != "local",
        remedy="use --transformer-impl local, the default on a CPU",
    ),
    Impossible(
        flag="--distributed-backend nccl",
        given=lambda a: a.distributed_backend == "nccl",
        remedy="use --distributed-backend gloo, the default on a CPU",
    ),
    Impossible(
        flag="--attention-backend flash or fused",
        given=lambda a: a.attention_backend.name in ("flash", "fused") or a.use_flash_attn,
        remedy="use --attention-backend unfused, the default on a CPU",
    ),
    Impossible(
        flag="--fp8-format or --fp4-format",
        given=lambda a: bool(a.fp8) or bool(a.fp4),
        remedy="use --bf16 or fp32",
    ),
    Impossible(
        flag="a CUDA graph",
        given=lambda a: a.cuda_graph_impl != "none" or bool(a.enable_cuda_graph) or bool(a.external_cuda_graph),
        remedy="leave out --cuda-graph-impl",
    ),
    Impossible(
        flag="--tp-comm-overlap",
        given=lambda a: a.tp_comm_overlap,
        remedy="leave it out",
    ),
    Impossible(
        flag="--context-parallel-size above 1",
        given=lambda a: a.context_parallel_size > 1,
        remedy="use --context-parallel-size 1 (the local attention does not split the context)",
    ),
    Impossible(
        flag="--use-megatron-fsdp",
        given=lambda a: a.use_megatron_fsdp,
        remedy="use --use-distributed-optimizer",
    ),
    Impossible(
        flag="--use-torch-fsdp2",
        given=lambda a: a.use_torch_fsdp2,
        remedy="use --use-distributed-optimizer",
    ),
    Impossible(
        flag="--optimizer-cpu-offload",
        given=lambda a: a.optimizer_cpu_offload,
        remedy="leave it out (the optimizer is on the CPU)",
    ),
    Impossible(
        flag="--use-precision-aware-optimizer",
        given=lambda a: a.use_precision_aware_optimizer,
        remedy="leave it out",
    ),
    Impossible(
        flag="--use-nccl-ub",
        given=lambda a: a.nccl_ub,
        remedy="leave it out",
    ),
)


def check(args: argparse.Namespace) -> None:
    """Raise :class:`UsageError` for the first flag in ``args`` (parsed, not yet validated) that needs a GPU."""
    for each in IMPOSSIBLE:
        if each.given(args):
            raise UsageError(f"{each.flag} cannot work without a GPU: {each.remedy}")
