"""One micro-batch on every rank that needs one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# What upstream's broadcast expects to find on the first tensor-parallel rank, present or not.
FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


def stage_needs_data(args: Any, vp_stage: int | None = None) -> bool:
    """Whether this pipeline stage reads tokens or labels (the ends of the pipeline, and multi-token prediction)."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    ignore_virtual = vp_stage is None
    ends = parallel_state.is_pipeline_first_stage(
        ignore_virtual=ignore_virtual, vp_stage=vp_stage
    ) or parallel_state.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
    return ends or mtp_on_this_rank(
        layout=getattr(args, "pipeline_model_parallel_layout", None),
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=ignore_virtual,
        vp_stage=vp_stage,
    )


def next_batch(args: Any, data_iterator: Iterator[Any] | None, vp_stage: int | None = None) -> dict[str, Any]:
    """The next micro-batch as a dictionary with a value or None under each of ``FIELDS``.

    Only tensor-parallel rank 0 reads ``data_iterator``; upstream's broadcast gives the others theirs. ``tokens``,
    ``labels``, ``position_ids``: int64 ``[micro_batch, seq]``; ``loss_mask``: float32 of that shape;
    ``attention_mask``: bool ``[micro_batch, 1, seq, seq]`` or None. A stage in the middle gets None everywhere.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank

    if not stage_needs_data(args, vp_stage):
        return dict.fromkeys(FIELDS)
    ignore_virtual = vp_stage is None
    batch: dict[str, Any] = dict.fromkeys(FIELDS)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        if data_iterator is None:
            raise RuntimeError("this rank should read data but has no data iterator")
        for name, value in next(data_iterator).items():
            if name in batch and value is not None:
                batch[name] = value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        # Evaluation, the only pass without gradients, may have its own size.
        micro_batch_size=args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp_on_this_rank(
            layout=getattr(args, "pipeline_model_parallel_layout", None),
            mtp_num_layers=args.mtp_num_layers,
            ignore_virtual=ignore_virtual,
            vp_stage=vp_stage,
        ),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(
            ignore_virtual=ignore_virtual, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
    )
    result: dict[str, Any] = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    return result
