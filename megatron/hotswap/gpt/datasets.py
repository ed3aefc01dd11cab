"""Data sets for upstream's trainer, from its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.hotswap.gpt.batch import stage_needs_data

# Fields of upstream's data set configuration that are called otherwise on the command line.
RENAMED = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
}
SAME = (
    "allow_ambiguous_pad_tokens",
    "context_parallel_size",
    "data_parallel_size",
    "eod_mask_loss",
    "full_validation",
    "mid_level_dataset_surplus",
    "mmap_bin_files",
    "multiple_validation_sets",
    "num_dataset_builder_threads",
    "object_storage_cache_path",
    "reset_attention_mask",
    "reset_position_ids",
    "split",
)


def dataset_config(args: Any, tokenizer: Any) -> Any:
    """Upstream's ``GPTDatasetConfig`` for validated arguments."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training.utils import get_blend_and_blend_per_split

    values = {name: getattr(args, name) for name in SAME}
    values |= {name: getattr(args, argument) for name, argument in RENAMED.items()}
    values["blend"], values["blend_per_split"] = get_blend_and_blend_per_split(args)
    if args.per_dataset_sequences_path is not None:
        values["sequences_per_dataset"] = json.loads(Path(args.per_dataset_sequences_path).read_text())
    if args.sequence_parallel:
        values["sequence_parallel_size"] = args.tensor_model_parallel_size
    return GPTDatasetConfig(tokenizer=tokenizer, **values)


def train_valid_test_datasets(num_samples: list[int | None], vp_stage: int | None = None) -> Any:
    """Upstream's provider: the three data sets for the numbers of samples wanted of each.

    Runs on every rank; those that read no data take part in upstream's barriers only.
    """
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import MockGPTDataset
    from megatron.training import get_args, get_tokenizer, print_rank_0

    from megatron.hotswap.gpt.corpus import GPTDataset

    args = get_args()

    def reads_data() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and stage_needs_data(args, vp_stage)

    print_rank_0("> building train, validation, and test data sets for GPT ...")
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        reads_data,
        dataset_config(args, get_tokenizer()),
    ).build()


# Upstream calls a provider on all ranks only if it says so.
train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]
