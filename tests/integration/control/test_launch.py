"""``deadpool launch``: every node started by hand, one of them killed."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DUMMY = Path(__file__).parent / "dummy"
DEADLINE_S = 60.0


def start(node: int, port: int, tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    arguments = ["--nodes", "2", "--spares", "1", "--coordinator", f"127.0.0.1:{port}", "--node-id", str(node)]
    arguments += ["--run-dir", str(tmp_path / "run"), "--preload", "json", "--preflight", "dummy_preflight:inspect"]
    script = [str(DUMMY / "train.py"), "--deadpool", "--steps", "40", "--step-seconds", "0.03"]
    return subprocess.Popen(
        [sys.executable, "-m", "deadpool_ext.cli.main", "launch", *arguments, *more, "--", *script],
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


def test_secrets_are_needed_and_kept(tmp_path: Path, port: int) -> None:
    open_file = tmp_path / "open"
    open_file.write_text("x" * 32)
    open_file.chmod(0o644)
    for more, message in (
        ([], "--secret-file is needed"),
        (["--secret-file", str(open_file)], "chmod 600"),
        (["--secret-file", str(tmp_path / "none")], "No such file"),
        (["--node-id", "9"], "--node-id 9"),
    ):
        process = start(0, port, tmp_path, *more)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, len(err.strip().splitlines())) == (2, 1)
        assert message in err
