"""``deadpool local`` with a dummy trainer: whole jobs, node losses, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deadpool_ext.cli.compare import compare
from deadpool_ext.cli.status import status
from deadpool_ext.protocol.types import UsageError

ROOT = Path(__file__).resolve().parents[3]
DUMMY = Path(__file__).parent / "dummy"
DEADLINE_S = 60.0
GONE_S = 15.0


class Launched:
    """A launcher and everything it started, recognised by a mark in their environment."""

    def __init__(self, tmp_path: Path, options: list[str], script: list[str]) -> None:
        self.mark = f"DEADPOOL_TEST_MARK={uuid.uuid4().hex}"
        self.run_dir = tmp_path / "run"
        name, value = self.mark.split("=")
        path = os.pathsep.join([str(ROOT), str(DUMMY)])
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "deadpool_ext.cli.main", "local", "--run-dir", str(self.run_dir)),
                *("--preload", "json", "--preflight", "dummy_preflight:inspect", *options, "--", *script),
            ],
            cwd=tmp_path,
            env=os.environ | {name: value, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def until(self, text: str) -> None:
        """Read the output until a line contains ``text``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        pytest.fail(f"{text!r} was not printed: {self.process.communicate(timeout=DEADLINE_S)}")

    def left(self) -> list[str]:
        """Processes of this job that are alive."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
                if self.mark.encode() in environment:
                    found.append(Path(f"/proc/{entry}/comm").read_text().strip())
            except OSError:
                continue
        return found

    def pid_of(self, name: str) -> int:
        """Pid of the job's process with this name (as in ps)."""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if (
                    Path(f"/proc/{entry}/comm").read_text().strip() == name
                    and self.mark.encode() in Path(f"/proc/{entry}/environ").read_bytes()
                ):
                    return int(entry)
            except OSError:
                continue
        pytest.fail(f"no process {name}: {self.left()}")

    def wait_gone(self) -> None:
        """Everything ends within a bound."""
        end = time.monotonic() + GONE_S
        while self.left():
            assert time.monotonic() < end, self.left()
            time.sleep(0.01)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The run's events of this name."""
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == name]

    def final(self) -> dict[str, Any]:
        """final.json."""
        content: dict[str, Any] = json.loads((self.run_dir / "final.json").read_text())
        return content


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """``launch(*options, script=[...])``; kills what a failed test leaves."""
    started: list[Launched] = []

    def start(*options: str, script: list[str] | None = None, steps: int = 6, step_seconds: float = 0.0) -> Launched:
        place = tmp_path / str(len(started))
        place.mkdir()
        arguments = ["--deadpool", "--steps", str(steps), "--step-seconds", str(step_seconds)]
        started.append(Launched(place, list(options), script or [str(DUMMY / "train.py"), *arguments]))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.communicate()


SIZE = ("--nodes", "2", "--ranks-per-node", "2")


def digests(launched: Launched) -> dict[int, str]:
    return {seat["rank"]: seat["digests"]["state"] for seat in launched.final()["seats"]}


def test_a_killed_node_is_replaced_and_the_result_is_the_same(launch: Launch) -> None:
    calm, hit = launch(*SIZE), launch(*SIZE, "--spares", "1", "--fault", "kill-node:node=1,step=3,phase=optimizer")
    assert calm.finish()[0] == 0
    code, out, err = hit.finish()
    assert (code, err) == (0, "")
    assert digests(hit) == digests(calm)
    seats = hit.final()["seats"]
    assert [seat["node"] for seat in seats] == ["n0", "n0", "n2", "n2"]
    for seat in seats[:2]:  # the survivors never restarted
        assert seat["process_start"] == seat["process_end"]
    (recovery,) = hit.events("recovery_done")
    assert recovery["steps_replayed"] <= 1
    assert recovery["mono"] - hit.events("fault_injected")[0]["mono"] == pytest.approx(
        recovery["seconds"]["total"], abs=0.05
    )
    steps = [json.loads(line) for line in (hit.run_dir / "steps.jsonl").read_text().splitlines()]
    assert {step["iteration"] for step in steps} == set(range(1, 7))
    assert (
        "step 6/6" in out
        and "* n1 lost (connection closed) in step" in out
        and out.rstrip().splitlines()[-2].startswith("done; 6 iter")
    )
    assert str(hit.run_dir) in out.rstrip().splitlines()[-1]
    hit.wait_gone()
    calm.wait_gone()


def test_two_nodes_die_together_the_first_one_included(launch: Launch) -> None:
    faults = [f"kill-node:node={node},step=3,phase=forward" for node in (0, 2)]
    hit = launch("--nodes", "4", "--spares", "2", *(word for fault in faults for word in ("--fault", fault)))
    calm = launch("--nodes", "4")
    assert calm.finish()[0] == 0
    code, out, err = hit.finish()
    assert code == 0, (out, err)
    assert digests(hit) == digests(calm)
    assert {seat["node"] for seat in hit.final()["seats"]} == {"n1", "n3", "n4", "n5"}
    hit.wait_gone()


def test_a_newcomer_that_dies_in_the_recovery_is_replaced_too(launch: Launch) -> None:
    faults = ["kill-node:node=1,step=3,phase=optimizer"]
    faults += [f"kill-node:node=2,step={target},phase=recovery" for target in (1, 2, 3)]
    hit = launch("--nodes", "2", "--spares", "2", *(word for fault in faults for word in ("--fault", fault)))
    code, out, err = hit.finish()
    assert code == 0, (out, err)
    assert [seat["node"] for seat in hit.final()["seats"]] == ["n0", "n3"]
    assert len(hit.events("node_lost")) == 2
    hit.wait_gone()


def test_a_spare_that_dies_disturbs_nothing(launch: Launch) -> None:
    hit = launch(*SIZE, "--spares", "1", "--fault", "kill-node:node=2,after=0.1", steps=20, step_seconds=0.05)
    code, out, err = hit.finish()
    assert code == 0, (out, err)
    assert hit.final()["generations"] == 1
    assert "* spare n2 lost" in out
    hit.wait_gone()


def test_f1_the_chosen_spare_dies_during_the_swap_and_the_next_takes_over(launch: Launch) -> None:
    faults = ["kill-node:node=1,step=3,phase=optimizer"]
    faults += [f"kill-spare:node=2,step={target},phase=recovery" for target in range(1, 7)]  # whichever it goes back to
    words = (word for fault in faults for word in ("--fault", fault))
    hit = launch(*SIZE, "--spares", "2", *words, steps=12, step_seconds=0.05)
    code, out, err = hit.finish()
    assert code == 0, (out, err)
    assert [seat["node"] for seat in hit.final()["seats"]] == ["n0", "n0", "n3", "n3"]
    assert len(hit.final()["faults_missed"]) == 5 and "5 faults never happened" in out
    hit.wait_gone()


def test_f15_a_stopped_node_that_comes_back_after_it_was_replaced_ends_itself_and_touches_nothing(
    launch: Launch,
) -> None:
    calm = launch(*SIZE, steps=60, step_seconds=0.05)
    assert calm.finish()[0] == 0
    faults = ("--spares", "1", "--fault", "stop-node:node=1,step=3,phase=optimizer", "--deadline", "node_timeout_s=2")
    hit = launch(*SIZE, *faults, steps=60, step_seconds=0.05)
    hit.until("recovered in")
    stopped = [hit.pid_of(name) for name in hit.left() if name.endswith(" n1")]
    assert len(stopped) >= 4  # agent, replicator, two workers
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    code, out, err = hit.finish()
    assert code == 0, (out, err)
    assert digests(hit) == digests(calm)
    assert hit.final()["generations"] == 2 and [seat["node"] for seat in hit.final()["seats"]] == [
        *["n0"] * 2,
        *["n2"] * 2,
    ]
    assert "given up: no sign of life" in (hit.run_dir / "logs" / "n1" / "agent.log").read_text()
    resumed = hit.events("recovery_done")[0]["mono"]
    everything = map(json.loads, (hit.run_dir / "events.jsonl").read_text().splitlines())
    assert [event for event in everything if event.get("node") == "n1" and event["mono"] > resumed] == []
    hit.wait_gone()


def test_without_a_spare_the_job_stops_with_a_reason(launch: Launch) -> None:
    hit = launch(*SIZE, "--fault", "kill-node:node=1,step=2,phase=forward")
    code, out, _ = hit.finish()
    assert code == 3
    assert "spare" in hit.final()["reason"]
    assert "stopped with exit code 3" in out
    hit.wait_gone()


def test_a_killed_worker_is_forked_again_on_its_node(launch: Launch) -> None:
    hit = launch(*SIZE, steps=40, step_seconds=0.05)
    hit.until("step 2/40")
    os.kill(hit.pid_of("dp-r1 n0"), signal.SIGKILL)
    code, out, err = hit.finish()
    assert code == 0, (out, err)
    seats = hit.final()["seats"]
    assert [seat["node"] for seat in seats] == ["n0", "n0", "n1", "n1"]
    assert [seat["process_start"] == seat["process_end"] for seat in seats] == [True, False, True, True]
    assert hit.events("failure_classified")[0]["class"] == "transient"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_f21_interrupted_nothing_is_left(launch: Launch, number: signal.Signals) -> None:
    hit = launch(*SIZE, "--spares", "1", steps=10000, step_seconds=0.02)
    hit.until("step 2/")
    hit.process.send_signal(number)
    code, out, _ = hit.finish()
    assert code == 128 + number
    assert number.name in out
    assert hit.left() == []
    assert json.loads((hit.run_dir / "status.json").read_text())["state"] == "interrupted"


def test_a_killed_launcher_takes_everything_with_it(launch: Launch) -> None:
    hit = launch(*SIZE, "--spares", "1", steps=10000, step_seconds=0.02)
    hit.until("step 2/")
    assert len(hit.left()) > 10
    shown = CliRunner().invoke(status, [str(hit.run_dir)]).output
    assert "not running" not in shown and "running" in shown
    hit.process.kill()
    hit.wait_gone()
    # Nobody could write that it is over: whoever asks is told all the same.
    assert "not running any more: it was killed while running" in CliRunner().invoke(status, [str(hit.run_dir)]).output
    assert json.loads(CliRunner().invoke(status, [str(hit.run_dir), "--json"]).output)["running"] is False
    with pytest.raises(UsageError, match="was killed before its end"):
        CliRunner().invoke(compare, [str(hit.run_dir), str(hit.run_dir)], catch_exceptions=False)


def test_the_scripts_own_failure_ends_the_job_with_its_line(launch: Launch) -> None:
    hit = launch(*SIZE, script=[str(DUMMY / "train.py"), "--deadpool", "--fail"])
    code, out, _ = hit.finish()
    assert code == 1
    assert "ValueError: the dummy fails as asked" in out
    hit.wait_gone()


def test_f13_memory_that_is_not_there_is_said_before_anything_is_lost(launch: Launch) -> None:
    script = [str(DUMMY / "train.py"), "--deadpool", "--steps", "3", "--claimed-bytes", str(1 << 50)]
    code, out, err = launch(*SIZE, script=script).finish()
    assert code == 1, (out, err)
    assert "bytes of host memory" in out


@pytest.mark.parametrize(
    ("options", "script", "message"),
    [
        (["--nodes", "0"], ["train.py"], "at least 1"),
        (["--nodes", "2"], ["no_such.py"], "no such script: no_such.py"),
        (["--nodes", "2", "--fault", "kill-node:node=7,step=1"], ["--deadpool"], "no node '7'"),
        (["--nodes", "2", "--fault", "nonsense"], ["--deadpool"], "unknown kind"),
        (["--nodes", "2", "--deadline", "fence_s=x"], ["--deadpool"], "NAME=SECONDS"),
        (["--nodes", "2"], ["--deadpool", "--bad-argument"], "does not take --bad-argument"),
        (["--nodes", "2", "--fault", "kill-node:node=1,step=7"], ["--deadpool", "--steps", "6"], "ends after step 6"),
        (["--nodes", "2", "--preload", "no_such_module"], ["--deadpool"], "no_such_module"),
    ],
)
def test_usage_errors_are_one_line(launch: Launch, options: list[str], script: list[str], message: str) -> None:
    script = script if script[0].endswith(".py") else [str(DUMMY / "train.py"), *script]
    refused = launch(*options, script=script)
    code, _, err = refused.finish()
    assert code == 2
    assert message in err
    assert not refused.run_dir.exists()
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_a_used_run_directory_is_refused(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    code, _, err = launch(*SIZE, "--run-dir", str(tmp_path / "full")).finish()
    assert code == 2 and "not empty" in err


def test_unprotected_the_script_gets_what_torchrun_gives(launch: Launch) -> None:
    plain = launch(*SIZE, script=[str(DUMMY / "train.py"), "--steps", "3"])
    code, _, err = plain.finish()
    assert (code, err) == (0, "")
    log = (plain.run_dir / "logs" / "n1" / "3.log").read_text()
    assert "['3', '1', '4', '127.0.0.1', '1']" in log
    plain.wait_gone()


def test_unprotected_a_failing_rank_ends_the_run(launch: Launch) -> None:
    code, out, _ = launch(*SIZE, script=[str(DUMMY / "train.py"), "--fail"]).finish()
    assert code == 1
    assert "ValueError: the dummy fails as asked" in out
