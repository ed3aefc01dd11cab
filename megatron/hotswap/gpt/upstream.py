"""Small obstacles in upstream's wheel, moved out of the way in all runs; none changes a number."""

from __future__ import annotations

import queue
from pathlib import Path

import torch


def use_shipped_index_builder() -> None:
    """Keep upstream from running ``make``: its wheel holds the compiled helper but not the Makefile for it.

    A source tree with a Makefile is left alone.
    """
    from megatron.core.datasets import utils

    if not (Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = _compiled_already


def _compiled_already() -> None:
    import megatron.core.datasets.helpers_cpp  # noqa: F401  (an ImportError here names what is missing)


def save_in_process() -> None:
    """Give upstream's ``torch_dist`` writer a queue of this process, before it makes one in a process of its own.

    The writer's results go through a ``multiprocessing`` manager, started at the first save: seconds of imports and
    up to half a gigabyte a rank, and it stays behind when its rank is killed. Only ``--async-save``, which writes in
    another process, needs it.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def load_fp32_shards() -> None:
    """Let upstream load a sharded fp32 optimizer: there its shards are views of parameters that require gradients.

    Of its ways to load them, this one alone is not under ``no_grad``, and ends in "a view of a leaf Variable that
    requires grad is being used in an in-place operation".
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load = DistributedOptimizer.load_parameter_state_from_dp_reshardable
    if not hasattr(load, "__wrapped__"):
        DistributedOptimizer.load_parameter_state_from_dp_reshardable = torch.no_grad()(load)
