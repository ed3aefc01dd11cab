"""Python stacks of a worker's main thread, read from outside although the worker does not cooperate.

At start-up the worker registers a handler of the standard library's :mod:`faulthandler` for a real-time signal. It is
native code and takes no interpreter lock, so it answers also while other native code holds that lock. Only the thread
that the signal reaches, which is the main one, writes its frames: those of a running thread could change under it.
System calls that the signal interrupts go on by themselves (``SA_RESTART``, and the interpreter's own repetition).
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deadpool_ext.control import processes

#: Not SIGUSR1 or SIGUSR2: training scripts and batch systems use these.
STACK_SIGNAL: Final = signal.SIGRTMAX - 3
ANSWER_S: Final = 1.0
FRAMES: Final = 32
_POLL_S: Final = 0.01
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Frames, innermost first, as ``function (file:line)``; or why there are none."""

    frames: tuple[str, ...] = ()
    problem: str = ""


def answer_from_now_on(path: str) -> None:
    """In the worker, on its main thread: write the main thread's frames to this file whenever the signal comes."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)  # open for the life of the process
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)


class StackFile:
    """The agent's side: an anonymous file that one worker writes its frames to."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("deadpool-stack", os.MFD_CLOEXEC)
        self.path: Final = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._asking = asyncio.Lock()

    def close(self) -> None:
        """Drop the file, and with it the path."""
        os.close(self._fd)

    async def ask(self, pid: int, patience_s: float = ANSWER_S) -> Stack:
        """The worker's stack; answers within about ``patience_s`` seconds, whatever the worker does."""
        async with self._asking:
            problem = unanswerable(pid)
            if problem:
                return Stack(problem=problem)
            os.ftruncate(self._fd, 0)
            if not processes.send_signal(pid, STACK_SIGNAL):
                return Stack(problem="the process is gone")
            text = await self._answer(patience_s)
        frames = parse(text)
        if frames:
            return Stack(frames=frames)
        return Stack(problem=unanswerable(pid) or f"no answer within {patience_s:g} s")

    async def _answer(self, patience_s: float) -> str:
        """What was written, as soon as nothing more comes."""
        end, before = time.monotonic() + patience_s, -1
        while time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
            size = os.fstat(self._fd).st_size
            if size and size == before:
                break
            before = size
        return os.pread(self._fd, 1 << 16, 0).decode(errors="replace")


def unanswerable(pid: int) -> str:
    """Why this process cannot answer now; empty if it can."""
    match processes.state(pid):
        case None | "Z" | "X":
            return "the process is gone"
        case "T":
            return "stopped by a signal"
        case "t":
            return "stopped by a debugger"
        case "D":
            return "in uninterruptible I/O"
    return "" if catches(pid, STACK_SIGNAL) else "the worker has not started yet"


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal: without one the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def parse(text: str) -> tuple[str, ...]:
    """Frames of the first thread in what :mod:`faulthandler` wrote, innermost first."""
    frames: list[str] = []
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match is not None:
            frames.append(f"{match['function']} ({_short(match['file'])}:{match['line']})")
        elif frames:
            break  # the end of this thread
    return tuple(frames[:FRAMES])


def _short(path: str) -> str:
    """The last three parts of a path: enough to find it, and nothing about where things are installed."""
    return "/".join(path.rsplit("/", 3)[-3:])
