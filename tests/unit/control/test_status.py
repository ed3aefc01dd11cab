"""Reading and showing a run directory, and the launcher's progress lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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

JOB_START = {
    "event": "job_start",
    "nodes": ["n0", "n1"],
    "spares": ["n2"],
    "world_size": 4,
    "ranks_per_node": 2,
    "tensor_parallel": 1,
    "pipeline_parallel": 2,
    "data_parallel": 2,
}
DROP = {"kind": "drop-connection", "step": 2, "phase": "forward", "after_s": None}
KILL = {"kind": "kill-node", "node": "n1", "step": 4, "phase": "backward", "after_s": None}
CLASSIFIED = {
    "event": "failure_classified",
    "kind": "node_lost",
    "node": "n1",
    "class": "permanent",
    "reason": "lost node n1: connection to its agent: closed",
    "evidence": "connection",
}
LOSS: tuple[dict[str, Any], ...] = (
    {"event": "fault_injected", "node": "n1", "rank": 2, "fault": KILL},
    CLASSIFIED | {"event": "failure_detected"},
    CLASSIFIED,
    {"event": "node_lost", "node": "n1", "seats": [2, 3], "reason": "connection to its agent: closed"},
    {"event": "fence", "reason": "lost node n1"},
    {"event": "generation_start", "generation": 1, "seats": {"n0": [0, 1], "n2": [2, 3]}},
    {"event": "degraded", "reason": "lost node n1", "seats": [2, 3]},
    {"event": "redundancy_restored", "seconds": 0.44},
    {
        "event": "recovery_done",
        "version": 3,
        "steps_replayed": 0,
        "sources": {"keep": 2, "replica": 2},
        "seconds": {"detect": 0.04, "plan": 0.0, "rebuild": 0.3, "resume": 0.52, "total": 0.86},
    },
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = prepare_run_directory(tmp_path / "run")
    files = RunDirectory(path)
    files.event("node_lost", generation=1, node="n1", fields={"reason": "x"})
    files.event("replica_sealed", generation=1, node="n0", rank=0)
    files.step({"iteration": 8, "generation": 1, "lm_loss": 0.5, "step_seconds": 0.1})
    files.status(CONTENT)
    files.final({"iterations": 8, "code": 0})
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
    for word in ("job j1  done", "n0", "0 1", "connection ended", "* n1 lost (x)", "last finished step 8  loss 0.5000"):
        assert word in text.output, word
    machine = json.loads(CliRunner().invoke(status, [str(run_dir), "--json", "--watch"]).output)
    assert machine["state"] == "stopped" and machine["exit_code"] == 0 and machine["last_step"]["iteration"] == 8


def test_status_shows_ranks_that_stand_still_and_wait_for_nobody(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deadpool_ext.cli.status.is_running", lambda directory: True)
    still = {"rank": 3, "node": "n1", "place": "data", "iteration": 5, "still_s": 31.0, "waits": []}
    ranks = [still, still | {"rank": 0, "waits": ["allreduce of tp"]}, still | {"rank": 1, "still_s": 0.5}]
    files = RunDirectory(run_dir)
    files.status(CONTENT | {"state": "running", "ranks": ranks})
    files.close()
    output = CliRunner().invoke(status, [str(run_dir)]).output
    assert "rank 3 on n1 stands still in data of iteration 5 for 31 s" in output
    assert output.count("stands still") == 1


def test_no_run_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        read_status(tmp_path, events=5)


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    printer = ProgressPrinter(train_iters=20, tokens_per_step=100)
    printer.record("event", JOB_START)
    printer.record("event", {"event": "generation_start", "generation": 0, "seats": {"n0": [0, 1], "n1": [2, 3]}})
    printer.record("event", {"event": "spare_joined", "node": "n2", "spares": 1})  # told by job_start
    printer.record("step", {"iteration": 3, "generation": 0, "lm_loss": 1.25, "step_seconds": 0.5})
    for event in LOSS:
        printer.record("event", event)
    printer.record("step", {"iteration": 4, "generation": 1})
    assert capsys.readouterr().out.splitlines() == [
        "* job start: 4 ranks on 2 nodes n0 n1, spares n2, layout TP1 x PP2 x DP2",
        "step 3/20  loss 1.2500  0.50 s  200 tokens/s  generation 0  spares 1",
        "* fault: kill-node n1 at step 4, backward",
        "* n1 lost (connection closed) in step 4: seats 2 3",
        "* n2 takes over seats 2 3 (generation 1), the other 2 processes stay",
        "* redundancy restored after 0.4 s",
        "* recovered in 0.86 s: detect 0.04 rebuild 0.30 resume 0.52; resumed from iteration 3, "
        "0 completed steps recomputed",
        "step 4/20  generation 1  spares 0",
    ]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"event": "plan", "possible": True}, None),
        ({"event": "spare_left", "node": "n2", "reason": "x", "spares": 0}, "* spare n2 lost (x): 0 spares left"),
        ({"event": "spare_joined", "node": "n9", "spares": 2}, "* n9 joined as a spare: 2 spares now"),
        ({"event": "warning", "node": "n1", "rank": 3, "text": "odd\n thing"}, "* warning n1 rank 3: odd thing"),
        (
            {"event": "fault_injected", "node": "n2", "fault": {"kind": "kill-node", "after_s": 10.0}},
            "* fault: kill-node n2 after 10 s",
        ),
        (
            {"event": "fault_injected", "node": "n1", "rank": 3, "fault": DROP},
            "* fault: drop-connection n1 rank 3 at step 2, forward",
        ),
        (
            {"event": "failure_classified", "kind": "collective_failed", "reason": "seat 3 on n1 left a collective: E"},
            "* a collective failed during set-up, no node lost: seat 3 on n1 left it",
        ),
        (
            {"event": "failure_classified", "kind": "worker_exited", "rank": 3, "reason": "seat 3 ended"},
            "* seat 3 ended during set-up; it is forked again",
        ),
        ({"event": "durable_save", "node": "n0", "version": 7, "more": {"a": 1}}, "* durable save n0: version 7"),
    ],
)
def test_events_are_one_line_without_structures(event: dict[str, Any], line: str | None) -> None:
    assert ProgressPrinter().event_line(event) == line


def test_summary() -> None:
    final = {"iterations": 8, "generations": 2, "failures": [{}], "replayed_steps": 1}
    assert summary_lines(final, "/r", 0, "") == (
        "done; 8 iterations, 2 generations, 1 failure, 1 recomputed step",
        "run directory: /r",
    )
    assert summary_lines({}, "/r", 3, "no spare")[0] == "stopped with exit code 3: no spare"


def test_lines_are_whole_in_a_narrow_terminal_and_a_pipe(run_dir: Path) -> None:
    files = RunDirectory(run_dir)
    reason = "lost for a reason of many words " * 8
    files.status(CONTENT | {"lost": {"n1": reason.strip()}})
    files.close()
    output = CliRunner(env={"COLUMNS": "40"}).invoke(status, [str(run_dir)]).output
    assert reason.strip() in output
