"""Where the main thread is, told to whoever looks from outside, and how long it waited for others in an iteration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from deadpool_ext.comm.pulse import Pulse


class Places:
    """Writes a worker's place into its pulse. For the thread that trains; about a microsecond a call."""

    def __init__(self, pulse: Pulse | None) -> None:
        """``pulse``: None where nobody looks."""
        self._pulse = pulse
        self._place, self._iteration = "setup", 0
        self._waited_s = 0.0  # at the end of the last iteration

    def enter(self, place: str, iteration: int) -> None:
        """The main thread comes to ``place`` of the 1-based ``iteration``."""
        self._place, self._iteration = place, iteration
        if self._pulse is not None:
            self._pulse.enter(place, iteration)

    @contextlib.contextmanager
    def at(self, place: str, iteration: int) -> Iterator[None]:
        """Be at ``place`` within the block; afterwards (not after an error) where it was before."""
        before = self._place, self._iteration
        self.enter(place, iteration)
        yield
        self.enter(*before)

    def expect_backward(self, output: Any, iteration: int) -> None:
        """``output``: what upstream's forward step returned. Its gradient is the first one of this backward pass."""
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.enter("backward", iteration))

    def finish_iteration(self, seconds: float, stall_s: float) -> None:
        """An iteration took ``seconds``, of which ``stall_s`` at the gate; what it waited for others is known here."""
        if self._pulse is not None:
            waited_s = self._pulse.waited_s()
            self._pulse.set_busy(seconds - stall_s - (waited_s - self._waited_s))
            self._waited_s = waited_s

    def restart(self) -> None:
        """An iteration begins anew: what was waited before is no part of it."""
        if self._pulse is not None:
            self._waited_s = self._pulse.waited_s()
