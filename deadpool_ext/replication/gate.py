"""The gate before an optimizer step: nothing is overwritten before the version it starts from is committed."""

from __future__ import annotations

import time
from collections.abc import Callable

from deadpool_ext.protocol.types import Version
from deadpool_ext.replication.board import Board
from deadpool_ext.replication.errors import FencedError, GateTimeoutError, StoppedError

_FIRST_POLL_S = 0.0002
_LAST_POLL_S = 0.001


def is_committed(board: Board, generation: int, version: Version) -> bool:
    """Whether ``version`` (or a later one) is committed in ``generation``. Raises :class:`FencedError`."""
    fence = board.fence_generation()
    if fence > generation:
        raise FencedError(fence)
    commit = board.committed()
    return commit is not None and commit.generation == generation and commit.version.v >= version.v


def wait_committed(
    board: Board,
    generation: int,
    version: Version,
    deadline: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> float:
    """Block until ``version`` is committed world-wide in ``generation``; returns the seconds waited (0.0: no wait).

    ``deadline`` is a value of ``time.monotonic()``. Raises :class:`FencedError` as soon as the board shows a newer
    generation, :class:`StoppedError` when ``should_stop`` says so, :class:`GateTimeoutError` at the deadline. Sleeps
    between looks, so other threads of the process run; a signal handler may raise out of it.
    """
    if is_committed(board, generation, version):
        return 0.0
    started = time.monotonic()
    poll_s = _FIRST_POLL_S
    while True:
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.5, _LAST_POLL_S)
        if is_committed(board, generation, version):
            return time.monotonic() - started
        if should_stop():
            raise StoppedError(f"stopped while waiting for the commit of version {version.v}")
        if time.monotonic() >= deadline:
            commit = board.committed()
            raise GateTimeoutError(
                f"version {version.v} (lineage {version.lineage}) was not committed in generation {generation} after "
                f"{time.monotonic() - started:.1f} s; last commit: {commit}"
            )
