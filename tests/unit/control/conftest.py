"""A job, and a worker session connected to the test as its agent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deadpool_ext.control.session import WorkerSession
from deadpool_ext.control.wire import BlockingConnection
from deadpool_ext.protocol.messages import JobSpec, TakeSeat
from deadpool_ext.protocol.types import Layout

SECRET = b"test secret"
SessionFactory = Callable[..., tuple[BlockingConnection, WorkerSession]]


def _job(**changes: Any) -> JobSpec:
    layout = Layout(
        world_size=4,
        ranks_per_node=2,
        tensor_parallel=1,
        pipeline_parallel=1,
        data_parallel=4,
        dp_groups=((0, 1, 2, 3),),
    )
    values: dict[str, Any] = {
        "job_id": "test",
        "argv": ("script.py",),
        "cwd": str(Path.cwd()),
        "env": {},
        "layout": layout,
    }
    return JobSpec(**(values | changes))


@pytest.fixture
def make_job() -> Callable[..., JobSpec]:
    """``make_job(**changes)``: a job of four seats on two nodes."""
    return _job


@pytest.fixture
def open_session() -> Iterator[SessionFactory]:
    """``open_session(**job changes) -> (agent's connection, started session of rank 0 on n0)``."""
    opened: list[tuple[BlockingConnection, WorkerSession]] = []

    def open_one(**changes: Any) -> tuple[BlockingConnection, WorkerSession]:
        ours, theirs = socket.socketpair()
        agents: list[BlockingConnection] = []
        thread = threading.Thread(target=lambda: agents.append(BlockingConnection.open(theirs, SECRET, client=False)))
        thread.start()
        worker = BlockingConnection.open(ours, SECRET, client=True)
        thread.join(10)
        seat = TakeSeat(rank=0, local_rank=0, generation=0, solo=False, job=_job(**changes), board_path="")
        session = WorkerSession(worker, seat, "n0")
        session.start()
        opened.append((agents[0], session))
        return opened[-1]

    yield open_one
    for agent, session in opened:
        session.close()
        agent.close()


@pytest.fixture
def agent_and_session(open_session: SessionFactory) -> tuple[BlockingConnection, WorkerSession]:
    """One connected pair with a plain job."""
    return open_session()
