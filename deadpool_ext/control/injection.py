"""A worker's part in faults on purpose: standing where one is armed, and doing to itself what it is told to do.

A fault that has a place (step and phase) is announced when the main thread gets there; the main thread stands still
until the fault is carried out, by whoever does that, and goes on if it still can. A fault without a place comes as a
:class:`~deadpool_ext.protocol.messages.Strike` at any time and is carried out by the control thread, or, where it has
to be the main thread's own doing, at the next place that the main thread passes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from deadpool_ext.control.processes import is_main_thread
from deadpool_ext.protocol.faults import FaultSpec
from deadpool_ext.protocol.messages import FaultReached, Strike, Struck

FAULT_WAIT_S: Final = 60.0
EXIT_INJECTED: Final = 17
_POLL_S: Final = 0.5
#: Done by the main thread at the next place that it passes, where they come without a place of their own.
_MAIN_THREADS: Final = frozenset({"raise-rank", "stuck-rank", "corrupt-param", "corrupt-main"})


class InjectedError(RuntimeError):
    """The exception of the fault ``raise-rank``: to everybody who sees it, the training script's own."""


class Host(Protocol):
    """What the session gives."""

    @property
    def node(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def announced(self) -> int: ...
    @property
    def lost(self) -> bool: ...
    def send(self, message: object) -> None: ...
    def emit(self, event: str, **fields: Any) -> None: ...


@dataclass(slots=True)
class _Stand:
    told: Strike | None = None  # what the thread that stands here is to do
    over: bool = False


class Injection:
    """The faults of one worker. ``point`` belongs to training threads, the other methods to any."""

    def __init__(self, host: Host, faults: Iterable[dict[str, Any]]) -> None:
        self._host = host
        self._faults = {int(values["id"]): FaultSpec.from_dict(values) for values in faults}
        self._given_up: set[int] = set()
        self._changed = threading.Condition()
        self._standing: dict[int, _Stand] = {}  # by fault: a thread that stands there
        self._pending: list[Strike] = []  # for the main thread, at the next place
        self._actions: dict[str, Callable[[FaultSpec], None]] = {
            "hold-gil": lambda fault: hold_gil(fault.seconds or 0.0),
            "stuck-rank": lambda fault: _sleep(fault.seconds or 0.0),
            "slow-node": self._slow_down,
        }
        self.slow_s = 0.0  # what each iteration takes longer

    @property
    def phases(self) -> frozenset[str]:
        """Phases that any fault names."""
        return frozenset(fault.phase for fault in self._faults.values() if fault.phase is not None)

    def set_action(self, kind: str, action: Callable[[FaultSpec], None]) -> None:
        """How this process carries out a kind; for kinds that need to know the trainer."""
        self._actions[kind] = action

    def add(self, fault: FaultSpec) -> None:
        """One more fault, while the job runs. Its place may be one where nobody looked for faults before: whoever
        puts fault points there has to ask for :attr:`phases` again."""
        self._faults[fault.id] = fault

    def notify(self) -> None:
        """Something that a standing main thread waits for may have changed (a fence, the agent's end)."""
        with self._changed:
            self._changed.notify_all()

    # ---- main thread -----------------------------------------------------------------------------------------------

    def point(self, phase: str, step: int) -> None:
        """The calling thread is at ``phase`` of the 1-based iteration ``step``: stand there if a fault is armed.

        Returns at once when none is; also when a fence arrives meanwhile: the fault then stays armed.
        """
        while self._pending and is_main_thread():
            self._carry_out(self._pending.pop(0))
        for fault in tuple(self._faults.values()):
            here = (fault.step, fault.phase) == (step, phase) and fault.is_at(self._host.node, self._host.rank)
            if here and fault.id not in self._given_up:
                self._stand(fault)

    def _stand(self, fault: FaultSpec) -> None:
        host, started_in = self._host, self._host.announced
        stand = _Stand()
        with self._changed:
            self._standing[fault.id] = stand
        host.send(FaultReached(fault_id=fault.id, node=host.node, rank=host.rank))
        end = time.monotonic() + FAULT_WAIT_S
        with self._changed:
            while not (stand.over or stand.told or host.announced != started_in or host.lost):
                if time.monotonic() >= end:
                    self._given_up.add(fault.id)
                    break
                self._changed.wait(min(_POLL_S, max(0.0, end - time.monotonic())))
            del self._standing[fault.id]
        if stand.told is not None:
            self._carry_out(stand.told)
        elif fault.id in self._given_up:
            host.emit("warning", text=f"fault {fault.id} was reached but nobody carried it out")

    # ---- control thread --------------------------------------------------------------------------------------------

    def strike(self, strike: Strike) -> None:
        """Do it: on the main thread where it stands there for it or has to do it itself, else on this one."""
        with self._changed:
            stand = self._standing.get(int(strike.fault["id"]))
            if stand is not None:
                stand.told = strike
                self._changed.notify_all()
                return
        if strike.fault["kind"] in _MAIN_THREADS:
            self._pending.append(strike)
        else:
            self._carry_out(strike)

    def over(self, fault_id: int) -> None:
        """It is carried out, or will not be: whoever stands at it goes on."""
        with self._changed:
            stand = self._standing.get(fault_id)
            if stand is not None:
                stand.over = True
                self._changed.notify_all()

    def _carry_out(self, strike: Strike) -> None:
        host, fault = self._host, FaultSpec.from_dict(strike.fault)
        # Told first: the time is the blow's, and the process may not be able to speak afterwards.
        host.send(Struck(fault=strike.fault, node=host.node, rank=strike.rank, mono=time.monotonic()))
        if fault.kind == "raise-rank":
            raise InjectedError(f"fault {fault.id}: an exception of the training script")
        if fault.kind == "exit-rank":
            os._exit(EXIT_INJECTED)
        action = self._actions.get(fault.kind)
        if action is None:
            host.emit("warning", text=f"fault {fault.id}: this process does not know how to {fault.kind}")
            return
        action(fault)

    def _slow_down(self, fault: FaultSpec) -> None:
        self.slow_s = fault.seconds or 0.0


def _sleep(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold_gil(seconds: float) -> None:
    """Keep the interpreter lock for ``seconds``, as native code that forgets to release it does.

    Waits for a mutex that this thread itself holds: unlike a sleep, no signal cuts that short.
    """
    libc = ctypes.PyDLL(None)  # calls keep the interpreter lock
    mutex = ctypes.create_string_buffer(64)  # pthread_mutex_t is 40 bytes; zeros are an unlocked plain mutex
    until = _Timespec()
    until.seconds, until.nanoseconds = divmod(int((time.time() + seconds) * 1e9), 10**9)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(until))
    libc.pthread_mutex_unlock(mutex)
