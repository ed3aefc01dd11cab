"""The forward step and the loss that upstream's schedules call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.hotswap.gpt.batch import next_batch

LOSS = "lm loss"
# A loss this many times the recent one is reported as spiky (with upstream's --check-for-spiky-loss).
SPIKE_FACTOR = 10


def masked_loss(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of unmasked tokens, their number (int32 scalar), and the two for upstream's report.

    Both arguments hold one value per token, in any equal number. The report is its own storage: upstream's
    schedules divide the returned loss in place.
    """
    weights = loss_mask.reshape(-1).float()
    total = torch.dot(token_losses.reshape(-1).float(), weights)
    tokens = weights.sum().to(torch.int).detach()
    report = torch.stack([total.detach(), tokens.to(total.dtype)])
    return total, tokens, {LOSS: report}


def _validate(args: Any, loss: torch.Tensor) -> None:
    """Hand the loss to upstream's rerun machine, as the flags ask."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            machine.validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {what} loss in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=functools.partial(machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context=LOSS),
            message="found a spiky loss",
            tolerance=0.0,
            fatal=False,
        )


def _loss(
    args: Any, loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, tokens, report = masked_loss(loss_mask, output)
    _validate(args, total)
    return total, tokens, report


def forward_step(data_iterator: Iterator[Any] | None, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """One micro-batch forward: the stage's output (the last stage's: a loss per token) and the loss function."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args, get_timers

    args = get_args()
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = next_batch(args, data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, functools.partial(_loss, args, batch["loss_mask"])
