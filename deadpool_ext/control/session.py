"""The worker's side of the control plane: what a training process knows about its job, and how it is told of changes.

``current()`` is None in a process that Deadpool did not start. One control thread reads the agent's messages; the
main thread sends, and waits with :meth:`WorkerSession.wait_for`. Every wait has a deadline and ends at once when a
newer generation is announced.

Generations. ``session.generation`` is the one the main thread works in: the seat's at first, later whatever it enters
with :meth:`WorkerSession.enter_generation`. ``session.announced`` is the newest one a fence named. While
``announced > generation`` the session is *fenced*.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar

from deadpool_ext.control.injection import Injection
from deadpool_ext.control.pausing import PausePoint
from deadpool_ext.control.processes import is_main_thread
from deadpool_ext.control.session_errors import FencedError as FencedError
from deadpool_ext.control.session_errors import SessionError as SessionError
from deadpool_ext.control.session_errors import SessionLostError as SessionLostError
from deadpool_ext.control.session_errors import SupersededError as SupersededError
from deadpool_ext.control.session_errors import WaitTimeoutError as WaitTimeoutError
from deadpool_ext.control.wire import BlockingConnection, ConnectionLostError, WireError
from deadpool_ext.protocol.faults import FaultSpec
from deadpool_ext.protocol.messages import (
    AddFault,
    CollectiveFailed,
    Emit,
    FaultOver,
    Fence,
    HostStore,
    JobSpec,
    Pause,
    Recover,
    StoreReady,
    Strike,
    TakeSeat,
    WorkerFenced,
)

INTERRUPT_SIGNAL: Final = signal.SIGUSR1
INTERRUPT_REPEAT_S: Final = 0.05
LOST_GRACE_S: Final = 2.0
EXIT_SESSION_LOST: Final = 70
EXIT_FENCE_FAILED: Final = 71

FenceCallback = Callable[[Fence], None]
StoreHostCallback = Callable[[int], tuple[str, int]]
M = TypeVar("M")


class WorkerSession:
    """One seated worker. Made by the worker's start-up code; training code reaches it by :func:`current`."""

    def __init__(self, connection: BlockingConnection, seat: TakeSeat, node: str, host: str = "127.0.0.1") -> None:
        self.node: Final = node
        self.host: Final = host  # where other nodes reach this one
        self.rank: Final = seat.rank
        self.local_rank: Final = seat.local_rank
        self.world_size: Final = seat.job.layout.world_size
        self.solo: Final = seat.solo
        self.job: Final[JobSpec] = seat.job
        self.facts: Final[dict[str, Any]] = seat.facts
        self.board_path: Final = seat.board_path
        self.pulse_path: Final = seat.pulse_path
        self._seat_generation = seat.generation
        self._generation = seat.generation
        self._connection = connection
        self._condition = threading.Condition()
        self._fence: Fence | None = None  # the newest
        self._lost = False
        self._mailbox: list[Any] = []
        self._fence_callbacks: list[FenceCallback] = []
        self._host_store: StoreHostCallback | None = None
        self._pending_host_store: HostStore | None = None
        self.injection: Final = Injection(self, seat.job.faults)
        self.cause_of: Callable[[BaseException], str] = _cause_of
        self.iteration: int | None = None  # the 1-based one being computed, for whoever has to say when it ended
        self.pause: Final = PausePoint(seat.rank, self._condition, self.send)
        self._interruptible = 0
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = threading.Event()
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._run, name="deadpool-control", daemon=True)

    def start(self) -> None:
        """Start the control thread and install the interrupt's handler. Call on the main thread."""
        signal.signal(INTERRUPT_SIGNAL, self._interrupt)
        self._thread.start()

    def close(self) -> None:
        """End the session; the agent sees the connection's end. Idempotent; not for the control thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake_control()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if not self._thread.is_alive():  # otherwise it still uses them, and the process is about to end anyway
            self._connection.close()
            os.close(self._wake)

    # ---- generations -----------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The generation that the main thread works in."""
        return self._generation

    @property
    def announced(self) -> int:
        """The newest generation known: ``generation``, or a newer one named by a fence."""
        fence = self._fence
        return self._generation if fence is None else max(self._generation, fence.generation)

    @property
    def lost(self) -> bool:
        """True once the agent is gone."""
        return self._lost

    @property
    def fenced(self) -> bool:
        """True from a fence's arrival until the main thread enters its generation."""
        return self.announced > self._generation

    def check_fence(self) -> None:
        """Raise :class:`FencedError` if fenced."""
        if self.fenced:
            raise FencedError(self.announced)

    def enter_generation(self, generation: int) -> None:
        """The main thread works in ``generation`` from here on. SupersededError if a newer one is announced."""
        with self._condition:
            if self.announced > generation:
                raise SupersededError(self.announced)
            self._generation = generation

    def on_fence(self, callback: FenceCallback) -> None:
        """Call ``callback(fence)`` on the control thread at every fence, before the agent is told WorkerFenced.

        The callback rejects new operations and aborts those in flight; it must not wait for the main thread. If the
        session is fenced already, the callback has run when this returns. A callback that raises ends the process:
        operations that may still be in flight must not be taken for fenced.
        """
        done = threading.Event()

        def register() -> None:
            self._fence_callbacks.append(callback)
            if self._fence is not None and self.fenced:
                self._call_fence(callback, self._fence)
            done.set()

        self._on_control_thread(register)
        if not done.wait(30.0):
            raise SessionLostError("the control thread does not answer")

    # ---- messages --------------------------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        """Send to the agent, from any thread. Raises :class:`SessionLostError`."""
        try:
            self._connection.send(message)
        except ConnectionLostError as error:
            raise SessionLostError(str(error)) from error

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event of this rank to the run directory, from any thread."""
        self.send(Emit(event=event, generation=self._generation, node=self.node, rank=self.rank, fields=fields))

    def wait_for(self, message_type: type[M], generation: int, deadline_s: float) -> M:
        """Wait for the message of this type and generation (Recover, Rendezvous, ArenaReady, Finish) and take it.

        Raises :class:`SupersededError` at once when a newer generation is announced, :class:`SessionLostError` when
        the agent is gone, :class:`WaitTimeoutError` after ``deadline_s`` seconds. Not for the control thread.
        """
        end = time.monotonic() + deadline_s
        with self._condition:
            while True:
                if self._fence is not None and self._fence.generation > generation:
                    raise SupersededError(self._fence.generation)
                for index, message in enumerate(self._mailbox):
                    if isinstance(message, message_type) and generation_of(message) == generation:
                        del self._mailbox[index]
                        return message
                if self._lost:
                    raise SessionLostError("the agent is gone")
                remaining = end - time.monotonic()
                if remaining <= 0:
                    name = message_type.__name__
                    raise WaitTimeoutError(f"no {name} of generation {generation} within {deadline_s:g} s")
                self._condition.wait(remaining)

    def set_store_host(self, callback: StoreHostCallback) -> None:
        """``callback(generation) -> (host, port)`` opens a fresh rendezvous store when this rank is asked to.

        It runs on a thread of its own, once per generation; a request that came before is served now. An error in it
        is reported as a failed collective of that generation.
        """
        with self._condition:
            self._host_store = callback
            pending, self._pending_host_store = self._pending_host_store, None
        if pending is not None:
            self._serve_host_store(pending)

    # ---- interruption ----------------------------------------------------------------------------------------------

    def interruptible(self) -> Interruptible:
        """A region of the main thread in which a fence raises :class:`FencedError`, whatever blocks there.

        ``with session.interruptible(): batch = next(iterator)``. Outside such regions nothing is ever raised from
        the signal. Raises on entry if fenced already. Regions may be nested.
        """
        return Interruptible(self)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible and self.fenced:
            self._interruptible = 0  # once: the unwinding code must not be interrupted again
            raise FencedError(self.announced)

    def pause_point(self, iteration: int) -> None:
        """The main thread finished ``iteration`` and is in no operation: it stands still here if it is asked to.

        Raises FencedError if a newer generation ends that, SessionLostError if the agent is gone.
        """
        self.pause.reach(iteration, lambda: self.fenced or self._lost)
        self.check_fence()
        if self._lost:
            raise SessionLostError("the agent is gone")

    def fault_point(self, phase: str, step: int) -> None:
        """The main thread is at ``phase`` of the 1-based iteration ``step``; see :meth:`Injection.point`."""
        self.injection.point(phase, step)

    # ---- control thread --------------------------------------------------------------------------------------------

    def _on_control_thread(self, task: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:
            task()
            return
        if self._closed.is_set() or self._lost:
            raise SessionLostError("the session is over")
        self._tasks.append(task)
        self._wake_control()

    def _wake_control(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection.fileno(), selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            try:
                while not self._closed.is_set():
                    self._turn(selector)
            except WireError as error:
                self._on_lost(str(error))

    def _turn(self, selector: selectors.BaseSelector) -> None:
        while self._tasks:
            self._tasks.popleft()()
        # A signal that arrives just before the main thread enters a blocking call is lost: repeat it.
        repeat = self._interruptible > 0 and self.fenced
        ready = [] if self._connection.pending() else selector.select(INTERRUPT_REPEAT_S if repeat else None)
        files = {key.fileobj for key, _ in ready}
        if self._wake in files:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        if self._closed.is_set():
            return
        if self._connection.pending() or self._connection.fileno() in files:
            self._dispatch(self._connection.receive())
        elif repeat and not ready:
            self._signal_main()

    def _dispatch(self, message: Any) -> None:
        if isinstance(message, Fence):
            self._on_fence_message(message)
        elif isinstance(message, HostStore):
            self._on_host_store(message)
        elif isinstance(message, Pause):
            self.pause.ask(message)
        elif isinstance(message, Strike):
            self.injection.strike(message)
        elif isinstance(message, AddFault):
            self.injection.add(FaultSpec.from_dict(message.fault))
        elif isinstance(message, FaultOver):
            self.injection.over(message.fault_id)
        else:
            with self._condition:
                if generation_of(message) >= self._seat_generation and not self._is_stale(message):
                    self._mailbox.append(message)
                    self._condition.notify_all()

    def _is_stale(self, message: object) -> bool:
        return self._fence is not None and generation_of(message) < self._fence.generation  # INV-4

    def _on_fence_message(self, fence: Fence) -> None:
        with self._condition:
            if fence.generation <= max(self._seat_generation, self.announced):
                return  # INV-4
            self._fence = fence
            self._mailbox = [message for message in self._mailbox if not self._is_stale(message)]
            self._pending_host_store = None
            self._condition.notify_all()
        self.injection.notify()
        started = time.monotonic()
        for callback in tuple(self._fence_callbacks):
            self._call_fence(callback, fence)
        with contextlib.suppress(SessionLostError):
            seconds = time.monotonic() - started
            self.send(WorkerFenced(generation=fence.generation, rank=self.rank, seconds=seconds))
        self._signal_main()

    def _call_fence(self, callback: FenceCallback, fence: Fence) -> None:
        try:
            callback(fence)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(EXIT_FENCE_FAILED)

    def _signal_main(self) -> None:
        # Only where it can have an effect: elsewhere it would just cut short system calls of the trainer's libraries.
        ident = self._main.ident
        if self._interruptible > 0 and ident is not None:
            signal.pthread_kill(ident, INTERRUPT_SIGNAL)

    def _on_host_store(self, request: HostStore) -> None:
        with self._condition:
            if request.rank != self.rank or self._is_stale(request):
                return
            if self._host_store is None:
                self._pending_host_store = request
                return
        self._serve_host_store(request)

    def _serve_host_store(self, request: HostStore) -> None:
        callback = self._host_store
        assert callback is not None

        def serve() -> None:
            try:
                host, port = callback(request.generation)
            except Exception as error:  # reported: the coordinator decides what becomes of the generation
                traceback.print_exc()
                detail = f"no rendezvous store: {error}"
                answer: object = CollectiveFailed(generation=request.generation, rank=self.rank, detail=detail)
            else:
                answer = StoreReady(generation=request.generation, rank=self.rank, host=host, port=port)
            with contextlib.suppress(SessionLostError):
                self.send(answer)

        threading.Thread(target=serve, name=f"deadpool-store-{request.generation}", daemon=True).start()

    def _on_lost(self, reason: str) -> None:
        with self._condition:
            self._lost = True
            self._condition.notify_all()
        self.injection.notify()
        if not self._closed.wait(LOST_GRACE_S):
            print(f"deadpool: the agent is gone ({reason}); this worker ends", file=sys.stderr, flush=True)
            os._exit(EXIT_SESSION_LOST)


class Interruptible:
    """Context manager of :meth:`WorkerSession.interruptible`."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._outer = 0

    def __enter__(self) -> None:
        if not is_main_thread():
            raise SessionError("only the main thread can be interrupted")
        self._outer = self._session._interruptible
        self._session._interruptible = self._outer + 1
        # After the region is open: a fence that arrives from now on sends the signal, an earlier one is seen here.
        if self._session.fenced:
            self._session._interruptible = 0
            raise FencedError(self._session.announced)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._session._interruptible = 0 if isinstance(error, FencedError) else self._outer


def _cause_of(error: BaseException) -> str:
    return "memory" if isinstance(error, MemoryError) else "script"


def generation_of(message: object) -> int:
    """The generation that a message belongs to; -1 for messages that belong to none."""
    if isinstance(message, Recover):
        return message.plan.generation
    return int(getattr(message, "generation", -1))


_current: WorkerSession | None = None


def current() -> WorkerSession | None:
    """This process's session, or None if it is no Deadpool worker or has no seat yet."""
    return _current


def install(session: WorkerSession | None) -> None:
    """Set what :func:`current` returns; called by the worker's start-up code and by tests."""
    global _current
    _current = session
