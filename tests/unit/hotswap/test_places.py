"""Where the main thread says it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deadpool_ext.comm.pulse import Pulse
from megatron.hotswap.loop.places import Places


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse.create()
    yield made
    made.close()


def where(pulse: Pulse) -> tuple[str, int]:
    reading = pulse.read()
    return reading.place, reading.iteration


def test_after_a_place_within_another_it_is_back_but_not_after_an_error(pulse: Pulse) -> None:
    places = Places(pulse)
    places.enter("forward", 3)
    with places.at("data", 3):
        assert where(pulse) == ("data", 3)
    assert where(pulse) == ("forward", 3)
    with pytest.raises(RuntimeError), places.at("gate", 3):
        raise RuntimeError
    assert where(pulse) == ("gate", 3)  # that is where it came from


def test_the_backward_pass_begins_with_the_gradient_of_what_the_forward_step_returned(pulse: Pulse) -> None:
    places = Places(pulse)
    places.enter("forward", 2)
    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    places.expect_backward((output, None), 2)
    places.expect_backward((torch.ones(1), None), 2)  # nothing to compute a gradient of
    assert where(pulse) == ("forward", 2)
    output.sum().backward()
    assert where(pulse) == ("backward", 2)
    assert torch.equal(weight.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_time_at_the_gate_is_not_busy_and_without_a_pulse_nothing_is_told(pulse: Pulse) -> None:
    places = Places(pulse)
    places.finish_iteration(2.0, 0.5)
    assert pulse.read().busy_s == pytest.approx(1.5)
    quiet = Places(None)
    quiet.enter("forward", 1)
    quiet.finish_iteration(1.0, 0.0)
    quiet.restart()
