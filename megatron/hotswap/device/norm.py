"""Sequence parallelism for the torch norms of upstream's local layers.

Upstream refuses ``--sequence-parallel`` there because nothing marks the norm's parameters; the mark is what makes
their gradients be summed over the tensor-parallel group.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.hotswap.device.substitution import Substitution, replacing


def substitutions() -> list[Substitution]:
    """Replacement of ``WrappedTorchNorm.__new__``; it holds for references taken before."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    def build_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return replacing(WrappedTorchNorm, __new__=staticmethod(build_marked))
