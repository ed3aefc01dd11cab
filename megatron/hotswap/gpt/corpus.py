"""Upstream's GPT data set, except that a split without text is an error instead of an endless loop."""

from __future__ import annotations

import megatron.core.datasets.gpt_dataset as upstream

from deadpool_ext.protocol.types import UsageError


class GPTDataset(upstream.GPTDataset):
    """Reads and caches as upstream's does: the name is part of a cached index's name, so it stays the same."""

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        """Epochs that hold the samples wanted; upstream adds epochs until there are tokens enough."""
        if num_tokens_per_epoch == 0:
            split = self.index_split.name
            raise UsageError(
                f"the {split} split of {self.dataset_path} holds no text: give it a larger share in --split, or 0"
            )
        return super()._get_num_epochs(num_tokens_per_epoch)
