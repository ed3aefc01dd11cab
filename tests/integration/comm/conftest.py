"""Ranks as forked processes, each with a pipe to the test, which tells them what to do next."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import pytest
import torch

from deadpool_ext.comm.registry import Communicators

LIMIT_S = 90.0  # of every single wait: a busy machine is slow, a hang is longer than this
HOST = "127.0.0.1"


class Link:
    """A rank's end of the pipe. Messages are (name, value); both sides know which comes next."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, name: str, value: Any = None) -> None:
        self._pipe.send((name, value))

    def expect(self, name: str) -> Any:
        assert self._pipe.poll(LIMIT_S), f"nothing came while waiting for {name!r}"
        got, value = self._pipe.recv()
        assert got == name, f"expected {name!r}, got {got!r}: {value}"
        return value

    def connect(self, communicators: Communicators, generation: int, *, hosts: bool = False) -> int:
        """Serve the generation's store if it is this rank's turn, hear where it is, and connect."""
        if hosts:
            self.send("port", communicators.open_store(HOST)[1])
        return communicators.connect(generation, HOST, self.expect("port"), LIMIT_S)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that a thread without events of its own brings about."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "did not come true"
        threading.Event().wait(0.005)


Body = Callable[[int, Link], Any]


class Ranks:
    """The test's side: starts ranks, talks to them, strikes them, and leaves none behind."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._processes: dict[int, ForkProcess] = {}
        self._links: dict[int, Link] = {}

    def start(self, ranks: list[int], body: Body) -> None:
        for rank in ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_run, args=(body, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes[rank] = process
            self._links[rank] = Link(ours)

    def tell(self, ranks: list[int], name: str, value: Any = None) -> None:
        for rank in ranks:
            self._links[rank].send(name, value)

    def expect(self, ranks: list[int], name: str) -> list[Any]:
        return [self._links[rank].expect(name) for rank in ranks]

    def relay_port(self, host: int, ranks: list[int]) -> int:
        [port] = self.expect([host], "port")
        self.tell(ranks, "port", port)
        return int(port)

    def results(self, ranks: list[int]) -> list[Any]:
        return self.expect(ranks, "result")

    def strike(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        if number is signal.SIGKILL:
            self._processes[rank].join(LIMIT_S)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join(LIMIT_S)


def _run(body: Body, rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    link = Link(pipe)
    try:
        link.send("result", body(rank, link))
        link.expect("exit")  # a rank that leaves early would be a lost peer to the others
    except EOFError:
        return  # the test is over
    except BaseException:
        link.send("error", traceback.format_exc())
        raise


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.end()


@pytest.fixture(name="eventually")
def _eventually() -> Callable[[Callable[[], bool]], None]:
    return eventually
