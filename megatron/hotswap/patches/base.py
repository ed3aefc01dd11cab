"""What every run changes in upstream, protected or not: obstacles in its wheel. None of them changes a number.

Nothing of the runtime is imported here: a run without ``--deadpool`` loads this table and not the other.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from megatron.hotswap.patches.registry import Applied, Patch, apply
from megatron.hotswap.versions import MEGATRON

_VERSIONS = ("0.19.2",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What the entries below need to know of this run."""

    save_in_process: bool  # checkpoints are written by the rank itself


def _compile_helpers(original: Callable[..., Any], situation: Situation) -> Callable[..., Any]:
    """A source tree with a Makefile is left alone."""
    from megatron.core.datasets import utils

    @wraps(original)
    def compile_helpers() -> None:
        import megatron.core.datasets.helpers_cpp  # noqa: F401  (an ImportError here names what is missing)

    return original if (Path(utils.__file__).parent / "Makefile").exists() else compile_helpers


def _results_queue(original: Any, situation: Situation) -> Any:
    """Only ``--async-save``, which writes in another process, needs the queue that upstream would make."""
    return queue.Queue() if original is None and situation.save_in_process else original


def _load_shards(original: Callable[..., Any], situation: Situation) -> Callable[..., Any]:
    return torch.no_grad()(original)


BASE_PATCHES = (
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        kind="replace",
        versions=_VERSIONS,
        digest="84029a50ae8cfac1",
        why="runs make, but the wheel holds the compiled helper and not the Makefile for it",
        until="upstream's wheel can tell that its helper is compiled",
        make=_compile_helpers,
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_reshardable",
        kind="wrap",
        versions=_VERSIONS,
        digest="e175a179a6e3b89a",
        why="the only one of its ways to load that is not under no_grad: with fp32 parameters, whose shards are views "
        "of leaves that require gradients, it ends in an error",
        until="upstream loads this format under no_grad",
        make=_load_shards,
    ),
    Patch(
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue",
        kind="replace",
        versions=_VERSIONS,
        digest="",
        why="a queue of this process, made before upstream makes one in a process of its own: that takes seconds and "
        "half a gigabyte a rank at the first save, and is left behind when the rank is killed",
        until="upstream makes that process for --async-save only",
        make=_results_queue,
    ),
)

_applied: list[Applied] = []


def apply_once(situation: Situation) -> None:
    """Verify all entries, then apply them; nothing the second time. Raises :class:`~.registry.PatchError`."""
    if not _applied:
        _applied.append(apply(BASE_PATCHES, situation, MEGATRON))
