"""Writing token ids in the trainer's own format; ``deadpool data`` looks this module up by name."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def write_indexed_dataset(
    *, bin_path: str, idx_path: str, documents: Iterable[npt.NDArray[np.int32]], vocabulary_size: int
) -> tuple[int, int]:
    """Write each one-dimensional array of ids as a document; returns (documents, tokens).

    Ids are stored as uint16 where the vocabulary allows it, else int32, as upstream's own preprocessing does. The
    files are complete only when this returns; the caller writes to temporary names and renames.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(bin_path, dtype=DType.optimal_dtype(vocabulary_size))
    count = tokens = 0
    try:
        for ids in documents:
            builder.add_document(ids, [ids.size])
            count += 1
            tokens += ids.size
        builder.finalize(idx_path)
    finally:
        # finalize() closes it too; on an error nobody else would.
        builder.data_file.close()
    return count, tokens
