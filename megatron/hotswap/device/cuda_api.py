"""The rest of ``torch.cuda`` and ``torch.accelerator``: one device, always ready, with no memory of its own."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from megatron.hotswap.device.substitution import Substitution, replacing

# Compute capability reported to upstream: before Hopper, so that it takes no path that needs newer hardware.
CAPABILITY = (8, 0)
NAME = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProperties:
    """What ``torch.cuda.get_device_properties`` returns. ``total_memory`` in bytes."""

    name: str = NAME
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    total_memory: int = 16 << 30
    multi_processor_count: int = 1
    warp_size: int = 32


class DeviceContext:
    """``torch.cuda.device(index)``: selects _constant(), because there is one device."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        return None


def _constant(value: Any = None) -> Callable[..., Any]:
    """A new function each time: torch keeps tables keyed by its functions and refuses one under two names."""

    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return answer


def _memory_stats(device: Any = None) -> defaultdict[str, int]:
    return defaultdict(int)


@contextlib.contextmanager
def _nothing(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def substitutions() -> list[Substitution]:
    """Replacements on ``torch.cuda``, its submodules and ``torch.accelerator``."""
    memory = {
        "empty_cache": _constant(),
        "ipc_collect": _constant(),
        "max_memory_allocated": _constant(0),
        "max_memory_reserved": _constant(0),
        "mem_get_info": _constant((HostProperties().total_memory, HostProperties().total_memory)),
        "memory_allocated": _constant(0),
        "memory_reserved": _constant(0),
        "memory_snapshot": _constant([]),
        "memory_stats": _memory_stats,
        "memory_summary": _constant(""),
        "reset_max_memory_allocated": _constant(),
        "reset_peak_memory_stats": _constant(),
        "set_per_process_memory_fraction": _constant(),
    }
    return [
        *replacing(
            torch.cuda,
            # Not zero: upstream skips the set-up of model parallelism silently without a device.
            device_count=_constant(1),
            is_available=_constant(True),
            # Not False: torch.cuda._lazy_call queues work until CUDA starts, which here is never. The state of
            # upstream's RNG tracker is set through it.
            is_initialized=_constant(True),
            is_bf16_supported=_constant(True),
            init=_constant(),
            current_device=_constant(0),
            set_device=_constant(),
            device=DeviceContext,
            get_device_capability=_constant(CAPABILITY),
            get_device_name=_constant(NAME),
            get_device_properties=_constant(HostProperties()),
            can_device_access_peer=_constant(False),
            device_memory_used=_constant(0),
            utilization=_constant(0),
            temperature=_constant(0),
            power_draw=_constant(0),
            clock_rate=_constant(0),
            **memory,
        ),
        *replacing(torch.cuda.memory, **memory),
        *replacing(torch.cuda.nvtx, range_push=_constant(), range_pop=_constant(), mark=_constant(), range=_nothing),
        *replacing(torch.cuda.profiler, start=_constant(), stop=_constant()),
        # The generic accelerator interface must keep saying that there is none: DataLoader pins memory by it, and
        # torch's optimizers look for a graph capture by it.
        *replacing(
            torch.accelerator,
            is_available=_constant(False),
            device_count=_constant(0),
            current_accelerator=_constant(),
        ),
    ]
