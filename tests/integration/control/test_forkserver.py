"""The fork server and its workers, with the test in the agent's place."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_ext.control.forkserver import (
    Exited,
    Forked,
    ForkServer,
    ForkServerConfig,
    ForkServerError,
    PreloadFailed,
    Report,
    ServerReady,
)
from deadpool_ext.control.processes import is_alive
from deadpool_ext.control.wire import BlockingConnection, ConnectionLostError
from deadpool_ext.protocol.messages import Emit, JobSpec, TakeSeat, WorkerExited, WorkerHello
from deadpool_ext.protocol.types import Layout

DEADLINE_S = 20.0
LAYOUT = Layout(
    world_size=2, ranks_per_node=2, tensor_parallel=1, pipeline_parallel=1, data_parallel=2, dp_groups=((0, 1),)
)


class FakeAgent:
    """Listens for workers and collects the fork server's reports."""

    def __init__(self, preload: tuple[str, ...] = ("json",)) -> None:
        self.secret = secrets.token_bytes(16)
        self.name = f"deadpool-test-{secrets.token_hex(8)}"
        self.server = ForkServer.start(ForkServerConfig(node="n0", secret=self.secret, preload=preload))
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"\0{self.name}")
        self.listener.listen()
        self.listener.settimeout(DEADLINE_S)
        self.connections: list[BlockingConnection] = []
        self.unread: list[Report] = []

    def fork_one(self) -> tuple[BlockingConnection, WorkerHello]:
        self.server.fork_workers((secrets.token_hex(4),), self.name)
        sock, _ = self.listener.accept()
        connection = BlockingConnection.open(sock, self.secret, client=False)
        self.connections.append(connection)
        hello = connection.receive()
        assert isinstance(hello, WorkerHello)
        return connection, hello

    def report[R: (ServerReady, PreloadFailed, Forked, Exited)](self, kind: type[R]) -> R:
        end = time.monotonic() + DEADLINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.server.fileno(), selectors.EVENT_READ)
            while True:
                for report in self.unread:
                    if isinstance(report, kind):
                        self.unread.remove(report)
                        return report
                assert selector.select(end - time.monotonic()), f"no {kind.__name__}"
                self.unread += self.server.reports()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.server.close()
        self.listener.close()
        os.waitpid(self.server.pid, 0)


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    fake = FakeAgent()
    yield fake
    fake.close()


def take_seat(tmp_path: Path, source: str, rank: int = 1) -> TakeSeat:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    job = JobSpec(
        job_id="test",
        argv=("train.py", "--lr", "0.1"),
        cwd=str(tmp_path),
        env={"FROM_JOB": "yes"},
        layout=LAYOUT,
        log_dir=str(tmp_path / "logs"),
    )
    return TakeSeat(rank=rank, local_rank=rank, generation=0, solo=False, job=job, board_path="")


def test_a_worker_runs_the_script_as_main_with_rank_and_log(agent: FakeAgent, tmp_path: Path) -> None:
    assert agent.report(ServerReady).threads == 1
    connection, hello = agent.fork_one()
    assert agent.report(Forked).pid == hello.pid
    connection.send(
        take_seat(
            tmp_path,
            """
            import os, sys, pickle
            from deadpool_ext.control import session
            class Local: pass
            pickle.loads(pickle.dumps(Local()))
            s = session.current()
            print(__name__, sys.argv, os.getcwd() == os.path.dirname(os.path.abspath(__file__)))
            s.emit("warning", env=[os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "FROM_JOB")])
            sys.exit(0)
            """,
        )
    )
    event = connection.receive()
    assert isinstance(event, Emit) and event.fields == {"env": ["1", "1", "2", "yes"]}
    assert agent.report(Exited).status == 0
    log = (tmp_path / "logs" / "n0" / "1.log").read_text()
    assert "__main__" in log and "train.py', '--lr', '0.1'] True" in log


@pytest.mark.parametrize(
    ("source", "status", "error"),
    [
        ("raise RuntimeError('boom\\nmore')", 1, "RuntimeError: boom"),
        ("import sys; sys.exit(7)", 7, "the script exited with code 7"),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("syntax error", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_the_scripts_own_error_is_told(agent: FakeAgent, tmp_path: Path, source: str, status: int, error: str) -> None:
    connection, _ = agent.fork_one()
    connection.send(take_seat(tmp_path, source))
    ended = connection.receive()
    assert isinstance(ended, WorkerExited)
    assert (ended.rank, ended.status, ended.script_error) == (1, status, error)
    assert agent.report(Exited).status == status


def test_a_killed_worker_is_reported_by_its_signal(agent: FakeAgent, tmp_path: Path) -> None:
    connection, hello = agent.fork_one()
    connection.send(take_seat(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert agent.report(Exited) == Exited(pid=hello.pid, status=-signal.SIGKILL)
    with pytest.raises(ConnectionLostError):
        connection.receive()


def test_a_warm_worker_leaves_quietly_with_its_agent(agent: FakeAgent) -> None:
    connection, _ = agent.fork_one()
    connection.close()
    assert agent.report(Exited).status == 0


def test_workers_die_with_the_fork_server() -> None:
    agent = FakeAgent()
    _, hello = agent.fork_one()
    pidfd = os.pidfd_open(hello.pid)
    os.kill(agent.server.pid, signal.SIGKILL)
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        assert selector.select(DEADLINE_S)
    os.close(pidfd)
    assert not is_alive(hello.pid)
    with pytest.raises(ForkServerError):
        while True:
            agent.server.reports()
    agent.close()


def test_a_preload_that_fails_says_which_module() -> None:
    agent = FakeAgent(preload=("json", "no_such_module_here"))
    assert "no_such_module_here" in agent.report(PreloadFailed).detail
    agent.close()
