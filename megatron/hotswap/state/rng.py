"""Random number generators of a rank: Python, NumPy, torch CPU, device, and Megatron's named tracker states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def capture_rng() -> dict[str, Any]:
    """States of all generators; tensors are uint8 on the CPU. Main thread, no random draw in flight."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {name: state.clone() for name, state in tracker.get_states().items()},
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Put back what :func:`capture_rng` returned. Last of all restores: building data iterators may draw numbers."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: state.clone() for name, state in states["tracker"].items()})
