"""Random numbers: the device's generator *is* the CPU generator.

Upstream's tracker forks the device generator for dropout inside tensor-parallel regions. With one generator the
sequence is another than on a GPU, but it is complete: saving and restoring either state restores both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from megatron.hotswap.device.substitution import Substitution, replacing


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _seed_all(seed: int) -> None:
    _seed(seed)


def _draw_seed() -> None:
    torch.default_generator.seed()


def _draw_seed_all() -> None:
    _draw_seed()


def _get_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _get_states() -> list[torch.Tensor]:
    return [torch.default_generator.get_state()]


def _set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _set_states(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        _set_state(state)


def _initial_seed() -> int:
    return torch.default_generator.initial_seed()


def _is_news(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def accept_one_generator() -> None:
    """Silence upstream's warning, many times a step, that a fork of the device generator changed the CPU's."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_news)


def substitutions() -> list[Substitution]:
    """Replacements on ``torch.cuda`` and ``torch.cuda.random`` (upstream reaches for both)."""
    functions = {
        "manual_seed": _seed,
        "manual_seed_all": _seed_all,
        "seed": _draw_seed,
        "seed_all": _draw_seed_all,
        "initial_seed": _initial_seed,
        "get_rng_state": _get_state,
        "get_rng_state_all": _get_states,
        "set_rng_state": _set_state,
        "set_rng_state_all": _set_states,
    }
    return [
        *replacing(torch.cuda, default_generators=(torch.default_generator,), **functions),
        *replacing(torch.cuda.random, **functions),
    ]
