"""What makes upstream's set-up come out right in a process that goes through it alone.

The first holders of a seat record the few results of set-up collectives that matter; a newcomer of that seat is told
them with its seat and replays them. Everything else that its solo communicators answer is overwritten by the restore.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.training import get_args

from megatron.hotswap.loop.worker import ResilientWorker
from megatron.hotswap.state import codec


def replay_set_up(original: Callable[..., None], worker: ResilientWorker) -> Callable[..., None]:
    """Object gathers that are recorded (first holders) or replayed (newcomers) until ``train()``: they decide
    parameter groups."""
    facts = worker.session.facts
    recorded = list(codec.decode(facts["gathered"])) if "gathered" in facts else []

    @wraps(original)
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        if worker.state is not None or worker.loading:  # set-up is over, or this is what a newcomer leaves out
            return original(object_list, obj, group=group)
        if worker.session.solo:
            object_list[:] = recorded.pop(0)
            return None
        original(object_list, obj, group=group)
        worker.note_fact("gathered", list(object_list))
        return None

    return all_gather_object


def preset_flags(worker: ResilientWorker) -> None:
    """A newcomer without a dataset would be told that there is nothing to train, and upstream would skip training."""
    if worker.session.solo and "flags" in worker.session.facts:
        vars(get_args()).update(codec.decode(worker.session.facts["flags"]))
