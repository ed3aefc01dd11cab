"""Telling a torn collective from an error of the training script, and letting go of what the traceback holds."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from torch.distributed import DistBackendError, DistError

_GLOO_MARKS = ("gloo/", "gloo::", "Connection closed by peer", "Connection reset by peer", "deadpool: generation")


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from or during, outermost first; each once."""
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        current = stack.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        stack += [current.__context__, current.__cause__]


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective failed, be it underneath an error that its failure provoked."""
    return any(
        isinstance(link, (DistBackendError, DistError))
        or (isinstance(link, RuntimeError) and any(mark in str(link) for mark in _GLOO_MARKS))
        for link in chain(error)
    )


def release_frames(error: BaseException) -> None:
    """Clear the frames of a whole chain: they hold works of dead groups and generators that would run later."""
    for link in list(chain(error)):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
        link.__context__ = None
        link.__cause__ = None


def summary(error: BaseException) -> str:
    """One line for events: type and first line of the message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"
