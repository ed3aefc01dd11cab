"""DataLoaders that leave the training RNG alone.

Building an iterator of a DataLoader draws a base seed, from the CPU generator unless it has one of its own. On a CPU
that generator is also the device's, so the draw would shift every later dropout mask, and a run that rebuilds its
iterators (after a load, after a recovery) would differ from one that does not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader

from megatron.hotswap.device.substitution import Substitution, replacing

_init = DataLoader.__init__


@functools.wraps(_init)
def _init_with_own_generator(self: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("generator") is None:
        kwargs["generator"] = torch.Generator().manual_seed(0)
    kwargs["pin_memory"] = False
    _init(self, *args, **kwargs)


def substitutions() -> list[Substitution]:
    """Replacements on ``torch.utils.data.DataLoader``."""
    return replacing(DataLoader, __init__=_init_with_own_generator)
