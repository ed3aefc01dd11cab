"""Adam with one integer step per group, against torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron.hotswap.device.adam import HostAdam

SHAPES = ((3, 5), (17,), (1,))


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_torchs_adam_bit_for_bit(adam_w_mode: bool, weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    mine = HostAdam(ours, adam_w_mode=adam_w_mode, **options)
    reference = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(theirs, fused=True, **options)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(mine.state[a][moment], reference.state[b][moment])


def test_the_step_is_an_integer_of_the_group() -> None:
    params = parameters()
    optimizer = HostAdam([{"params": params[:2]}, {"params": []}, {"params": params[2:]}])
    assert all("step" not in group for group in optimizer.param_groups)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    steps = [group.get("step") for group in optimizer.param_groups]
    assert steps == [2, None, 2]
    assert type(steps[0]) is int
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}


def test_a_loaded_state_continues_exactly() -> None:
    params = parameters()
    optimizer = HostAdam(params)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = HostAdam(resumed)
    other.load_state_dict(state)
    for run, through in ((params, optimizer), (resumed, other)):
        set_gradients(run, 2)
        through.step()
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_views_of_flat_storage_may_take_the_place_of_state() -> None:
    plain, flat = parameters(), parameters()
    ours, reference = HostAdam(flat), HostAdam(plain)
    for params, optimizer in ((plain, reference), (flat, ours)):
        set_gradients(params, 0)
        optimizer.step()
    sizes = [p.numel() for p in flat]
    storage = torch.empty(3, sum(sizes))
    for p, parts in zip(flat, zip(*(row.split(sizes) for row in storage), strict=True), strict=True):
        views = [part.view(p.shape) for part in parts]
        for view, old in zip(views, (p.data, ours.state[p]["exp_avg"], ours.state[p]["exp_avg_sq"]), strict=True):
            view.copy_(old)
        p.data, ours.state[p]["exp_avg"], ours.state[p]["exp_avg_sq"] = views
    for params, optimizer in ((plain, reference), (flat, ours)):
        set_gradients(params, 1)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain, flat, strict=True))
    assert torch.equal(storage[0], torch.cat([p.detach().flatten() for p in plain]))


@pytest.mark.parametrize("options", [{"bias_correction": False}, {"capturable": True}])
def test_what_a_host_cannot_do_is_an_error(options: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="on CPU"):
        HostAdam(parameters(), **options)  # type: ignore[arg-type]
