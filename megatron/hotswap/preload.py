"""Import once, fork often: everything that training will import, in one call.

A fork server calls :func:`preload` and forks; the children then import nothing more that is worth the time.
"""

from __future__ import annotations

import importlib
import os

# In this order. Behind upstream's trainer come modules that it, or torch, imports late: found by comparing
# sys.modules after a short run (training, evaluation, torch_dist save and load) with that after the rest.
MODULES = (
    "megatron.training.training",
    "megatron.training.arguments",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer",
    "torch.utils.serialization",
    "megatron.hotswap.gpt.entry",
    "megatron.hotswap.gpt.corpus",
    "megatron.hotswap.gpt.datasets",
    "megatron.hotswap.gpt.step",
    "megatron.hotswap.patches.base",
    "megatron.hotswap.device.defaults",
)

# Read when the libraries are loaded. Without them numpy's BLAS starts a thread per core at import, and a process
# with threads is not fit to fork. One is also torchrun's own choice for a rank.
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def preload() -> None:
    """Import what training needs and, without a CUDA device, put the CPU in its place.

    Leaves the process as fit to fork as it was: no thread, no socket, no CUDA context (torch is asked for devices
    through the driver's management library only), if numpy and torch had not been imported before. Takes 4-10 s of
    one core; nothing the second time.
    """
    for name, value in SINGLE_THREADED.items():
        os.environ.setdefault(name, value)
    from megatron.hotswap import device

    device.install()
    for name in MODULES:
        importlib.import_module(name)
