"""What a worker session raises."""

from __future__ import annotations

from deadpool_ext.protocol.types import DeadpoolError


class SessionError(DeadpoolError):
    """Base of what a worker session raises."""


class SupersededError(SessionError):
    """A fence announced a newer generation than the one waited in."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"generation {generation} has begun")
        self.generation = generation


class FencedError(SessionError):
    """Raised in the main thread, inside an interruptible region, because generation ``generation`` has begun."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"fenced by generation {generation}")
        self.generation = generation


class SessionLostError(SessionError):
    """The agent is gone; the process should end."""


class WaitTimeoutError(SessionError):
    """A message did not come within its deadline."""
