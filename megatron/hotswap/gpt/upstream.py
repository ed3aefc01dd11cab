"""Two things that upstream's wheel starts processes for, and need not."""

from __future__ import annotations

import queue
from pathlib import Path


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
