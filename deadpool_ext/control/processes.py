"""Process trees on Linux: die with the parent, names, identities, descendants, kill."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from deadpool_ext.protocol.types import DeadpoolError

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
EXIT_ORPHANED: Final = 72

_libc: Final = ctypes.CDLL(None, use_errno=True)


class ProcessError(DeadpoolError):
    """The system refused something about a process."""


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    value = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
    if _libc.prctl(option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise ProcessError(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent's forking thread ends.

    ``parent_pid`` was taken before the fork: if the parent died before the call took effect, nobody would send the
    signal any more, so this process exits at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent died, so that it can find and reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Name shown by ps and top; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def reset_signals() -> None:
    """Default handlers in a freshly forked child: whatever the parent installed is not for it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches the whole foreground process group: only the launcher acts on it, so that the end is orderly.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state (field 3) on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot: with the pid it identifies the process. 0 if it is gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else 0


def state(pid: int) -> str | None:
    """The letter of /proc/PID/stat: R running, S sleeping, D in uninterruptible I/O, T stopped, Z dead and not reaped;
    None if there is no such process."""
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in "ZX"


def thread_count() -> int:
    """OS threads of this process."""
    return len(os.listdir("/proc/self/task"))


def _children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            found.setdefault(int(fields[1]), []).append(int(entry))
    return found


def children(parent: int) -> list[int]:
    """Pids of the direct children of a process, dead ones that were not reaped included."""
    return _children_by_parent().get(parent, [])


def descendants(root: int) -> list[int]:
    """All processes below ``root`` (not itself), parents before children."""
    by_parent = _children_by_parent()
    found: list[int] = []
    queue = [root]
    while queue:
        below = by_parent.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process that may be gone; True if it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_tree(root: int) -> list[int]:
    """SIGKILL a process and everything below it in one pass; returns the pids that were hit, ``root`` first.

    The tree is read before the first signal. A process forked in between dies with its parent
    (:func:`die_with_parent`).
    """
    pids = [root, *descendants(root)]
    return [pid for pid in pids if send_signal(pid, signal.SIGKILL)]


def wait_dead(pids: Iterable[int], timeout_s: float) -> bool:
    """Wait until all of these have ended (zombies have); False if any has not after ``timeout_s`` seconds."""
    end = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
        finally:
            os.close(descriptor)
    return True


def reap(pid: int) -> int | None:
    """Status of a dead child (exit code, or minus the signal number), None if it still runs or is not ours."""
    with contextlib.suppress(ChildProcessError):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
    return None


def is_main_thread() -> bool:
    """True on the interpreter's main thread."""
    return threading.current_thread() is threading.main_thread()
