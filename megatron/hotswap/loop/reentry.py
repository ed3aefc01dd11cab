"""What must be reset between leaving upstream's ``train()`` by an exception and entering it again.

The list is data: each entry names what it resets and what happened when it was left out. ``before`` runs as soon as
the main thread is out of the trainer, ``after`` once groups are connected and the shard is in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.training import get_args, get_timers
from megatron.training import training as upstream

from megatron.hotswap.state.metadata import TrainerState
from megatron.hotswap.state.shards import leaf_optimizers


@dataclass(frozen=True, slots=True)
class Reset:
    """One thing to reset. ``otherwise`` is the observed effect of leaving it out."""

    name: str
    when: Literal["before", "after"]
    run: Callable[[TrainerState], None]
    otherwise: str


def _bucket_groups(state: TrainerState) -> list[Any]:
    return [group for chunk in state.model for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


def _timers(state: TrainerState) -> None:
    for timer in get_timers()._timers.values():
        timer._started = False


def _config_callbacks(state: TrainerState) -> None:
    state.config.no_sync_func = None
    state.config.grad_sync_func = None
    state.config.param_sync_func = None


def _bucket_handles(state: TrainerState) -> None:
    for chunk in state.model:
        chunk.force_all_reduce = False
        for parameter in chunk.parameters():
            parameter.grad = None
    for group in _bucket_groups(state):
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False
        group.grad_reduce_finished = False
        group.per_param_grad_ready_counts = {}
        group.is_last_microbatch = True


def _first_batch(state: TrainerState) -> None:
    for group in _bucket_groups(state):
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}


def _grad_norm_groups(state: TrainerState) -> None:
    for optimizer in (*leaf_optimizers(state.optimizer), state.optimizer):
        optimizer._has_grad_norm_group_cache = None


def _forward_hooks(state: TrainerState) -> None:
    if upstream.should_disable_forward_pre_hook(get_args()):
        for chunk in state.model:
            if not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()


def _parameters(state: TrainerState) -> None:
    for leaf in leaf_optimizers(state.optimizer):
        leaf._copy_main_params_to_model_params()
    for chunk in state.model:
        chunk.start_param_sync(force_sync=True)
        chunk.reset_param_sync_dispatch_state()


RESETS = (
    Reset("timers", "before", _timers, "assertion in core/timers.py: timer has already been started"),
    Reset("config_callbacks", "before", _config_callbacks, "assertion in train(): no_sync_func must be None"),
    Reset(
        "bucket_handles", "before", _bucket_handles, "multiple communication calls outstanding; stale handles waited on"
    ),
    Reset("first_batch", "before", _first_batch, "a newcomer reduces its first batch in another order than survivors"),
    Reset(
        "grad_norm_groups", "before", _grad_norm_groups, "hang: the newcomer all-reduces a flag that survivors cached"
    ),
    Reset(
        "forward_hooks", "before", _forward_hooks, "KeyError in DDP after a fault in the first iteration or evaluation"
    ),
    Reset("parameters", "after", _parameters, "silent divergence: model parameters are torn or of another version"),
)


def run_resets(state: TrainerState, when: Literal["before", "after"], skip: frozenset[str] = frozenset()) -> None:
    """Run the resets of one moment in table order. ``skip`` exists for tests of the tests. Main thread."""
    for reset in RESETS:
        if reset.when == when and reset.name not in skip:
            reset.run(state)
