"""Streams and events of a device on which all work is finished when the call returns."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

import torch

from megatron.hotswap.device.substitution import Substitution, replacing


class HostEvent:
    """A point in time. Work is synchronous, so an event is always reached; ``elapsed_time`` is in milliseconds."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._seconds - self._seconds) * 1e3


class HostStream:
    """A queue that is always empty. Usable wherever a CUDA stream is, also as a context manager."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = torch.device("cpu")

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        return None

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        return None


class StreamContext:
    """What ``torch.cuda.stream(s)`` returns: selects nothing, because there is one order of work."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        return None


_STREAM = HostStream()


# One function per name, although some do the same: torch keeps tables keyed by its functions.
def _current_stream(device: Any = None) -> HostStream:
    return _STREAM


def _default_stream(device: Any = None) -> HostStream:
    return _STREAM


def _set_stream(stream: Any) -> None:
    return None


def _synchronize(device: Any = None) -> None:
    return None


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    return None


def substitutions() -> list[Substitution]:
    """Replacements on ``torch.cuda`` and ``torch.Tensor``."""
    return [
        *replacing(
            torch.cuda,
            Stream=HostStream,
            ExternalStream=HostStream,
            Event=HostEvent,
            StreamContext=StreamContext,
            stream=StreamContext,
            current_stream=_current_stream,
            default_stream=_default_stream,
            set_stream=_set_stream,
            synchronize=_synchronize,
            is_current_stream_capturing=lambda: False,
        ),
        *replacing(torch.Tensor, record_stream=_record_stream),
    ]
