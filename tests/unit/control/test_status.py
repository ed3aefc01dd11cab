"""Reading and showing a run directory, and the launcher's progress lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from deadpool_ext.cli.status import read_status, status
from deadpool_ext.control.progress import ProgressPrinter, summary_lines
from deadpool_ext.control.rundir import RunDirectory, prepare_run_directory
from deadpool_ext.protocol.types import UsageError

CONTENT = {
    "job_id": "j1",
    "state": "stopped",
    "reason": "training finished",
    "generation": 1,
    "iteration": 8,
    "degraded": False,
    "failures": 1,
    "recoveries": 1,
    "nodes": {"n0": {"role": "active", "ready": True, "seats": [0, 1]}},
    "lost": {"n1": "connection ended"},
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = prepare_run_directory(tmp_path / "run")
    files = RunDirectory(path)
    files.event("node_lost", generation=1, node="n1", fields={"reason": "x"})
    files.event("replica_sealed", generation=1, node="n0", rank=0)
    files.step({"iteration": 8, "generation": 1, "lm_loss": 0.5, "step_seconds": 0.1})
    files.status(CONTENT)
    files.final({"iterations": 8})
    files.close()
    return path


def test_a_run_directory_is_new_or_empty(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="not empty"):
        prepare_run_directory(run_dir)


def test_events_carry_both_times_and_an_earlier_one_moves_both(tmp_path: Path) -> None:
    files = RunDirectory(prepare_run_directory(tmp_path / "run"))
    now = files.event("fence", generation=1)
    earlier = files.event("fault_injected", generation=1, mono=now["mono"] - 5.0)
    assert earlier["t"] == pytest.approx(now["t"] - 5.0, abs=0.5)
    files.close()


def test_a_directory_that_cannot_be_written_does_not_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = RunDirectory(tmp_path / "missing")
    files.event("fence", generation=1)
    files.status({})
    files.close()
    assert files.failed_writes == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_status_is_read_with_the_last_step_and_events(run_dir: Path) -> None:
    with open(run_dir / "events.jsonl", "a") as file:
        file.write('{"event": "half')  # being written
    run = read_status(run_dir, events=5)
    assert run.over and run.last_step is not None and run.last_step["iteration"] == 8
    assert [event["event"] for event in run.events] == ["node_lost"]


def test_status_command(run_dir: Path) -> None:
    text = CliRunner().invoke(status, [str(run_dir)])
    assert text.exit_code == 0
    for word in ("job j1", "stopped", "n0", "0 1", "lost", "node lost n1", "loss 0.5000"):
        assert word in text.output, word
    machine = json.loads(CliRunner().invoke(status, [str(run_dir), "--json", "--watch"]).output)
    assert machine["state"] == "stopped" and machine["last_step"]["iteration"] == 8


def test_no_run_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        read_status(tmp_path, events=5)


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    printer = ProgressPrinter(train_iters=20, tokens_per_step=100)
    printer.record("event", {"event": "job_start", "spares": ["n2"], "t": 1.0})
    printer.record("step", {"iteration": 3, "generation": 0, "lm_loss": 1.25, "step_seconds": 0.5})
    printer.record("event", {"event": "generation_start", "seats": {"n0": [0], "n2": [1]}})
    printer.record("step", {"iteration": 4, "generation": 1})
    assert capsys.readouterr().out.splitlines() == [
        "* job start: spares=['n2']",
        "step 3/20  loss 1.2500  0.50 s  200 tokens/s  generation 0  spares 1",
        "step 4/20  generation 1  spares 0",
    ]


def test_summary() -> None:
    final = {"iterations": 8, "generations": 2, "failures": [{}], "replayed_steps": 1}
    assert summary_lines(final, "/r", 0, "") == (
        "done; 8 iterations, 2 generations, 1 failure, 1 replayed steps",
        "run directory: /r",
    )
    assert summary_lines({}, "/r", 3, "no spare")[0] == "stopped with exit code 3: no spare"
