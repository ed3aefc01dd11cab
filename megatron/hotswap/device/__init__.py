"""The CPU as a training device: stands in for CUDA where, and only where, there is no CUDA device.

``install()`` is explicit; nothing happens at import. It changes attributes of ``torch`` (and of upstream's optimizer
package) once for the whole process: it holds in every thread, and in forked children.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch

from megatron.hotswap.device import cuda_api, loader, rng, streams, tensors
from megatron.hotswap.device.substitution import substitute

# Upstream's kernels are compiled for GPUs, a rank is one of many on its machine, and upstream insists on the last.
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

_done: set[str] = set()


@functools.cache
def needed() -> bool:
    """Whether torch sees no CUDA device. Asks the driver library, so that no CUDA context comes into being."""
    return torch.cuda.device_count() == 0


def installed() -> bool:
    """Whether the CPU stands in for CUDA in this process."""
    return "torch" in _done


def install(*, upstream: bool = True) -> bool:
    """Make the CPU the training device if it is :func:`needed`; returns whether the layer is in place.

    Idempotent. Call from the main thread before training threads exist; it may come before or after the import of
    Megatron. ``upstream=False`` leaves Megatron unimported: its optimizer then has to be dealt with by a later call.
    """
    if not needed():
        return False
    if "torch" not in _done:
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(1)  # torch, imported above, has read the variable already
        for name, value in ENVIRONMENT.items():
            if not os.environ.get(name):
                os.environ[name] = value
        substitute(
            [
                *tensors.substitutions(),
                *streams.substitutions(),
                *rng.substitutions(),
                *cuda_api.substitutions(),
                *loader.substitutions(),
            ]
        )
        rng.accept_one_generator()
        _done.add("torch")
    if upstream and "upstream" not in _done:
        from megatron.hotswap.device import adam, norm

        with warnings.catch_warnings():
            # Upstream's import says ten times that Transformer Engine and Apex are missing; here they must be.
            warnings.simplefilter("ignore")
            substitute([*adam.substitutions(), *norm.substitutions()])
        _done.add("upstream")
    return True
