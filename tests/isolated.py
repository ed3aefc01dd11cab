"""Calls in a forked child, for code that changes its process for good."""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable


class ChildFailed(AssertionError):
    """The call raised in the child; the text is its traceback."""


def in_child[T](call: Callable[[], T], *, seconds: float = 60) -> T:
    """Return what ``call()`` returns in a forked child (it must pickle). Raises :class:`ChildFailed`."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                answer = pickle.dumps((True, call()))
            except BaseException:  # told to the parent, whatever it is
                answer = pickle.dumps((False, traceback.format_exc()))
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(write_end)
    ready, _, _ = select.select([read_end], [], [], seconds)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    if not answer:
        raise ChildFailed(f"no answer from the child within {seconds} s, or it died")
    fine, value = pickle.loads(answer)
    if not fine:
        raise ChildFailed(value)
    return value
