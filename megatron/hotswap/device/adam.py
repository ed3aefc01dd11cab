"""Adam whose step count is one integer per parameter group: the shape of Apex's FusedAdam.

torch's own Adam keeps a step tensor per parameter. Upstream's distributed optimizer cannot save that before the first
step, and a loaded job starts again at step 0 without an error. With this shape its ``torch_dist`` save and load work
as they are, and a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.hotswap.device.substitution import Substitution, replacing

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdam(torch.optim.Optimizer):
    """Adam (``adam_w_mode=False``: weight decay added to the gradient) or AdamW, on host tensors.

    ``param_groups[i]["step"]`` is the number of steps taken; absent before the first. ``state[p]`` holds ``exp_avg``
    and ``exp_avg_sq``: fp32, the shape of ``p``, created at the first step or before it by upstream's
    ``init_state_fn``. They, and ``p.data``, may be replaced by views of other storage between two steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        """Raises ValueError for what a host cannot do: no bias correction, CUDA graph capture."""
        if not bias_correction or capturable:
            raise ValueError("Adam on CPU has bias correction and no CUDA graph capture")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient; ``closure`` recomputes the loss first, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        taken = int(group.get("step", 0))
        group["step"] = taken + 1
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            for moment in MOMENTS:
                if moment not in self.state[p]:
                    self.state[p][moment] = torch.zeros_like(p, dtype=torch.float32)
        beta1, beta2 = group["betas"]
        self._update(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            # The functional form counts in tensors and wants one per parameter.
            [torch.tensor(float(taken)) for _ in params],
            fused=True,  # one pass over memory per parameter, one dispatch for all of them
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def substitutions() -> list[Substitution]:
    """Put :class:`HostAdam` where upstream looks for Apex's, and say that it is Apex's."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    return [
        *replacing(optimizer, Adam=HostAdam, USING_PYTORCH_OPTIMIZER=False),
        *replacing(distrib_optimizer, Adam=HostAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True),
    ]
