"""Tensor creation and movement: a request for the ``cuda`` device is answered on the host.

The replacements sit at the places that take a device (factory functions and a few tensor methods), not in a
``TorchFunctionMode``: a mode is local to one thread and taxes every operation, whereas these hold in every thread
and cost about a quarter of a microsecond per *created* tensor and nothing for all other operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron.hotswap.device.substitution import Substitution, replacing

HOST = torch.device("cpu")

FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "frombuffer",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
METHODS = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
TYPED_TENSORS = (
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "ShortTensor",
)


def host_device(device: Any) -> Any:
    """``device`` itself, unless it names a CUDA device (as text, index or ``torch.device``): then the CPU device."""
    if isinstance(device, torch.device):
        return HOST if device.type == "cuda" else device
    if isinstance(device, str):
        return HOST if device.startswith("cuda") else device
    return HOST if isinstance(device, int) else device


def _creating(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create, updated=())
    def on_host(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = host_device(kwargs["device"])
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
        return create(*args, **kwargs)

    return on_host


_to = torch.Tensor.to
_type = torch.Tensor.type


@functools.wraps(_to, updated=())
def _to_on_host(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and isinstance(args[0], (str, int, torch.device)):
        args = (host_device(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = host_device(kwargs["device"])
    return _to(self, *args, **kwargs)


@functools.wraps(_type, updated=())
def _type_as_device(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Upstream's optimizers choose by this name: a strided host tensor calls itself ``torch.cuda.FloatTensor``."""
    if dtype is None:
        name = _type(self)
        return name.replace("torch.", "torch.cuda.", 1) if self.layout is torch.strided else name
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return _type(self, dtype, non_blocking, **kwargs)


def _same(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def substitutions() -> list[Substitution]:
    """Replacements on ``torch``, ``torch.Tensor`` and ``torch.nn.Module``."""
    # `with torch.device(...)` recognises factories by identity from a set that is built once, on first use: build it
    # from the originals, because they are what the wrappers call.
    _device_constructors()
    found = [
        Substitution(owner=torch, name=name, value=_creating(getattr(torch, name)))
        for name in FACTORIES
        if hasattr(torch, name)
    ]
    found += [
        Substitution(owner=torch.Tensor, name=name, value=_creating(getattr(torch.Tensor, name))) for name in METHODS
    ]
    found += replacing(torch.Tensor, to=_to_on_host, type=_type_as_device, cuda=_same, pin_memory=_same)
    found += replacing(torch.nn.Module, cuda=_same)
    # These must stay types: upstream asks isinstance(value, torch.cuda.FloatTensor).
    found += [Substitution(owner=torch.cuda, name=name, value=getattr(torch, name)) for name in TYPED_TENSORS]
    return found
