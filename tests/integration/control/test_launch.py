"""``deadpool launch``: every node started by hand, one of them killed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
DUMMY = Path(__file__).parent / "dummy"
DEADLINE_S = 60.0


def start(node: int, port: int, tmp_path: Path, *more: str, steps: int = 40) -> subprocess.Popen[str]:
    arguments = ["--nodes", "2", "--spares", "1", "--coordinator", f"127.0.0.1:{port}", "--node-id", str(node)]
    arguments += ["--run-dir", str(tmp_path / "run"), "--preload", "json", "--preflight", "dummy_preflight:inspect"]
    script = [str(DUMMY / "train.py"), "--deadpool", "--steps", str(steps), "--step-seconds", "0.03"]
    return launch(tmp_path, *arguments, *more, "--", *script)


def launch(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deadpool_ext.cli.main", "launch", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(DUMMY)])},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nodes_started_one_by_one_survive_the_loss_of_one(tmp_path: Path, port: int) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(16))
    nodes = [start(node, port, tmp_path, "--secret-file", str(secret)) for node in (0, 1, 2)]
    try:
        assert nodes[0].stdout is not None
        assert any("step 3/40" in line for line in nodes[0].stdout)
        nodes[1].kill()
        out, err = nodes[0].communicate(timeout=DEADLINE_S)
        assert nodes[0].returncode == 0, (out, err)
        assert nodes[2].wait(DEADLINE_S) == 0
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert [seat["node"] for seat in final["seats"]] == ["n0", "n2"]
    assert final["generations"] == 2


def events(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == name]


def wait_for_event(tmp_path: Path, name: str, **fields: Any) -> dict[str, Any]:
    end = time.monotonic() + DEADLINE_S
    while True:
        for event in events(tmp_path, name):
            if fields.items() <= event.items():
                return event
        assert time.monotonic() < end, f"no {name} {fields}"
        time.sleep(0.02)


def test_f1_nodes_join_and_leave_as_spares_at_any_time(tmp_path: Path, port: int) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(16))

    def join(name: str, *more: str) -> subprocess.Popen[str]:
        arguments = ("--coordinator", f"127.0.0.1:{port}", "--node-id", name, "--secret-file", str(secret))
        started[name] = launch(tmp_path, *arguments, "--preload", "json", *more)
        return started[name]

    started = {f"n{node}": start(node, port, tmp_path, "--secret-file", str(secret), steps=10000) for node in range(2)}
    try:
        join("early")  # takes the place of the spare that the job was told to wait for
        first = started["n0"]
        assert first.stdout is not None
        assert any("step 3/" in line for line in first.stdout)
        # More come; one leaves by the user's wish, one by a power cut: nobody else notices.
        join("n7")
        wait_for_event(tmp_path, "spare_joined", node="n7")
        join("n8")
        wait_for_event(tmp_path, "spare_joined", node="n8")
        started["early"].send_signal(signal.SIGINT)
        assert started["early"].wait(DEADLINE_S) == 130
        assert "stopped by its user" in wait_for_event(tmp_path, "spare_left", node="early")["reason"]
        started["n7"].kill()
        wait_for_event(tmp_path, "spare_left", node="n7")
        assert events(tmp_path, "fence") == []
        # A swap, while one more is on its way; then the newcomer is the only spare, and takes over in its turn.
        started["late"] = launch(tmp_path, "--join", str(tmp_path / "run"), "--node-id", "late", "--preload", "json")
        started["n1"].kill()
        wait_for_event(tmp_path, "recovery_done", generation=1)
        wait_for_event(tmp_path, "spare_joined", node="late")
        started["n8"].send_signal(signal.SIGTERM)
        assert started["n8"].wait(DEADLINE_S) == 143
        wait_for_event(tmp_path, "recovery_done", generation=2)
        (start_of_2,) = [event for event in events(tmp_path, "generation_start") if event["generation"] == 2]
        assert start_of_2["seats"] == {"n0": [0], "late": [1]}
        lost = wait_for_event(tmp_path, "node_lost", node="n8")
        assert "stopped by its user" in lost["reason"]
        # A name in use is refused with one line.
        again = join("n0x", "--ranks-per-node", "1")
        wait_for_event(tmp_path, "spare_joined", node="n0x")
        twin = launch(
            tmp_path,
            *("--coordinator", f"127.0.0.1:{port}", "--node-id", "n0x", "--secret-file", str(secret)),
            *("--preload", "json"),
        )
        _, err = twin.communicate(timeout=DEADLINE_S)
        assert twin.returncode == 2 and "n0x is a member already" in err
        assert again.poll() is None
    finally:
        for node in started.values():
            node.kill()
            node.communicate()


def test_secrets_are_needed_and_kept(tmp_path: Path, port: int) -> None:
    open_file = tmp_path / "open"
    open_file.write_text("x" * 32)
    open_file.chmod(0o644)
    for more, message in (
        ([], "--secret-file is needed"),
        (["--secret-file", str(open_file)], "chmod 600"),
        (["--secret-file", str(tmp_path / "none")], "No such file"),
        (["--join", str(tmp_path)], "--join DIR takes the place of"),
        (["--node-id", "a b"], "--node-id a b: give a number, or a name"),
    ):
        process = start(0, port, tmp_path, *more)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, len(err.strip().splitlines())) == (2, 1)
        assert message in err
