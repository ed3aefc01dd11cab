"""The launcher's connection to the coordinator: it carries out strikes, shows progress, and learns how the job ended.

The launcher owns the process trees, so it is the one that can kill a node from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deadpool_ext.control import processes
from deadpool_ext.control.agent_faults import signal_of
from deadpool_ext.control.progress import ProgressPrinter
from deadpool_ext.control.wire import Connection, WireError
from deadpool_ext.protocol.messages import JobEnded, OperatorHello, Progress, Strike, Struck

EXIT_STOPPED: Final = 3
END_DEADLINE_S: Final = 10.0
NEWS_DEADLINE_S: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Children:
    """Processes that the launcher forked. ``coordinator`` is None where it runs elsewhere."""

    coordinator: int | None
    agents: Mapping[str, int]  # node -> pid


class Operator:
    """One job's launcher on an event loop."""

    def __init__(self, name: str, children: Children, printer: ProgressPrinter, *, needed: int) -> None:
        """``needed``: with fewer agents than this before the job has begun, it is over."""
        self._name = name
        self._children = children
        self._nodes = {pid: node for node, pid in children.agents.items()}
        self._alive = {*self._nodes, *filter(None, [children.coordinator])}
        self._needed = needed
        self._struck: set[str] = set()
        self._printer = printer
        self._orderly = False
        self._all_gone = asyncio.Event()
        self._end: asyncio.Future[JobEnded] = asyncio.get_running_loop().create_future()

    async def run(self, address: tuple[str, int], secret: bytes) -> JobEnded:
        """Serve until the job ends, the coordinator dies or a signal comes; returns how it ended.

        After an orderly end the children had a bounded time to leave; what still runs is the caller's to end.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupted, number)
        descriptors = {os.pidfd_open(pid): pid for pid in self._alive}
        for descriptor, pid in descriptors.items():
            loop.add_reader(descriptor, self._child_ended, descriptor, pid)
        talk = asyncio.create_task(self._talk(address, secret))
        try:
            ended = await self._end
            if self._orderly and self._alive:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._all_gone.wait(), END_DEADLINE_S)
            return ended
        finally:
            talk.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talk
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    async def _talk(self, address: tuple[str, int], secret: bytes) -> None:
        try:
            reader, writer = await asyncio.open_connection(*address)
            connection = await Connection.open(reader, writer, secret, client=True)
            try:
                connection.send(OperatorHello(name=self._name, nodes=tuple(self._children.agents)))
                while True:
                    message = await connection.receive()
                    match message:
                        case Progress():
                            self._printer.record(message.kind, message.record)
                        case Strike():
                            self._strike(message, connection)
                        case JobEnded():
                            self._orderly = not self._end.done()
                            self._ended(message.code, message.reason)
            finally:
                connection.close()
        except (WireError, OSError) as error:
            self._ended(EXIT_STOPPED, f"the coordinator is gone ({error}); see its log")

    def _strike(self, strike: Strike, connection: Connection) -> None:
        """Hit a node from outside: its whole tree in one pass, as a power cut would, or its agent alone."""
        pid = self._children.agents.get(strike.node)
        blow = signal_of(str(strike.fault.get("kind")))
        if blow is None or pid is None or pid not in self._alive:
            self._printer.line(f"* fault not carried out: {strike.fault.get('kind')} on {strike.node}")
            return
        whole_tree, number = blow
        self._struck.add(strike.node)
        tree = [pid, *(processes.descendants(pid) if whole_tree else [])]
        # Told first: the time is the blow's, and the record of the cause should not come after its effects.
        connection.send(Struck(fault=strike.fault, node=strike.node, rank=strike.rank, mono=time.monotonic()))
        for victim in tree:
            processes.send_signal(victim, number)

    def _child_ended(self, descriptor: int, pid: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)
        status = processes.reap(pid)
        self._alive.discard(pid)
        for child in processes.children(os.getpid()):  # what a killed agent leaves is ours, and dies with it
            if child not in self._alive:
                processes.reap(child)
        if not self._alive:
            self._all_gone.set()
        # Why it ended may still be on its way from the coordinator, and comes first.
        node = self._nodes.get(pid)
        agents = sum(1 for other in self._alive if other in self._nodes)
        if node is None:
            reason = f"the coordinator ended with status {status}; see its log"
            loop.call_later(NEWS_DEADLINE_S, self._ended, EXIT_STOPPED, reason)
        elif node not in self._struck and not self._printer.started and agents < self._needed:
            reason = f"node {node} ended with status {status} before the job began; see its agent's log"
            loop.call_later(NEWS_DEADLINE_S, self._ended, EXIT_STOPPED, reason)

    def _interrupted(self, number: int) -> None:
        self._ended(128 + number, f"interrupted by {signal.Signals(number).name}")

    def _ended(self, code: int, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(JobEnded(code=code, reason=reason))
