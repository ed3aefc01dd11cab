"""Hooks in the trainer that say where it is, and where an armed fault stops the process so that it can be hit.

Fault points are not installed for phases that no fault of the job names; where the trainer is, is always told. A fault
that is given while the job runs has its phase hooked at the beginning of the next microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args
from megatron.training import training as upstream

from deadpool_ext.control.injection import Injection
from megatron.hotswap.device.health import stay_broken
from megatron.hotswap.loop.places import Places
from megatron.hotswap.state.metadata import TrainerState
from megatron.hotswap.state.shards import leaf_optimizers


class TrainerFaults:
    """Puts fault points into forward, backward, gradient sync and optimizer of one trainer."""

    def __init__(self, injection: Injection, places: Places) -> None:
        """``injection``: the process's own faults; phases that none of them names are not hooked."""
        self._injection = injection
        self._places = places
        self._hooked: set[str] = set()
        self._state: TrainerState | None = None
        self._microbatch = 0

    def reach(self, phase: str, step: int | None = None) -> None:
        """Announce ``phase`` of the 1-based iteration ``step`` (default: the one being computed)."""
        stay_broken()
        self._injection.point(phase, get_args().curr_iteration + 1 if step is None else step)

    def forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap upstream's forward step function; the second microbatch counts, or the only one."""

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            self._hook_new_phases()
            iteration = get_args().curr_iteration + 1
            self._places.enter("forward" if torch.is_grad_enabled() else "eval", iteration)
            if torch.is_grad_enabled() and get_attr_wrapped_model(args[1], "vp_stage"):
                pass  # another model chunk of a pipeline that is virtual: the first one counts
            elif torch.is_grad_enabled():
                if self._microbatch % get_num_microbatches() == 0 and self._injection.slow_s:
                    time.sleep(self._injection.slow_s)
                if self._microbatch % get_num_microbatches() == min(1, get_num_microbatches() - 1):
                    self.reach("forward")
                self._microbatch += 1
            else:
                self.reach("eval", iteration)
            output = original(*args, **kwargs)
            if torch.is_grad_enabled():
                self._places.expect_backward(output, iteration)
            return output

        return forward_step

    def restart(self) -> None:
        """Forget the microbatch count of an interrupted step."""
        self._microbatch = 0

    def install(self, state: TrainerState) -> None:
        """Hook gradient sync; where armed also backward, and the gap between Adam and the copy to the parameters."""
        self._state = state
        finalize = state.config.finalize_model_grads_func or upstream.finalize_model_grads

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            self._places.enter("grad_sync", get_args().curr_iteration + 1)
            self.reach("grad_sync")
            return finalize(*args, **kwargs)

        state.config.finalize_model_grads_func = finalize_model_grads
        self._hook_new_phases()

    def _hook_new_phases(self) -> None:
        """Main thread, between microbatches. Each phase is hooked once, when the first fault names it."""
        new = self._injection.phases - self._hooked
        if not new or self._state is None:
            return
        self._hooked |= new
        if "backward" in new:
            for chunk in self._state.model:
                for layer in get_attr_wrapped_model(chunk, "decoder").layers[:1]:  # a stage may have none
                    layer.register_forward_hook(self._hook_backward)
        if "optimizer" in new:
            for leaf in leaf_optimizers(self._state.optimizer):
                leaf._copy_main_params_to_model_params = self._before(leaf._copy_main_params_to_model_params)

    def _before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy_main_params_to_model_params(*args: Any, **kwargs: Any) -> Any:
            self.reach("optimizer")
            return original(*args, **kwargs)

        return copy_main_params_to_model_params

    def _hook_backward(self, module: Any, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.reach("backward"))
