"""How long a rank may stand still, where; and how long a node may be silent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deadpool_ext.protocol.deadlines import Deadlines
from deadpool_ext.protocol.pace import STEPS, Pace
from tests.unit.protocol.transcript import Transcript

TIMEOUTS = Path(__file__).resolve().parents[3] / "docs" / "timeouts.md"


def running() -> Transcript:
    """Two ranks; rank 0 waits for rank 1, which has finished an iteration already."""
    transcript = Transcript()
    transcript.run("config nodes=2 spares=1 dp=2")
    transcript.run("start")
    transcript.run("vital 0 place=grad_sync iteration=2 moves=1 issued=dp:1 waits=allreduce/dp/1/0,1")
    transcript.run("vital 1 place=forward iteration=1 moves=1")
    transcript.run("tick")
    transcript.run("vital 1 iteration=2 moves=2")
    transcript.run("tick")
    return transcript


def ended_after(transcript: Transcript, at_most: float) -> float | None:
    """Seconds from now to the failure, if there is one in time. Commits go on: the job as a whole does not stall."""
    since = transcript.now
    while transcript.now < since + at_most:
        transcript.now += 0.5
        transcript.run("n0 Committed version=0.0")
        if any("failure_detected" in line for line in transcript.run("tick")):
            return transcript.now - since
    return None


@pytest.mark.parametrize(
    ("place", "limit"), [("forward", 60.0), ("data", 60.0), ("optimizer", 60.0), ("eval", 600.0), ("save", 1800.0)]
)
def test_the_limit_depends_on_the_place(place: str, limit: float) -> None:
    transcript = running()
    transcript.run(f"vital 1 place={place}")
    assert ended_after(transcript, 2000.0) == pytest.approx(limit, abs=1.0)


def test_a_save_is_reported_later_than_a_step() -> None:
    transcript = running()
    transcript.run("vital 1 place=save")
    lines = transcript.run("until 59")
    assert lines == []
    assert "stands still in save" in transcript.run("until 61")[1]


def test_the_first_iteration_of_a_process_has_more_time() -> None:
    transcript = Transcript()
    transcript.run("config nodes=2 spares=1 dp=2")
    transcript.run("start")
    transcript.run("vital 0 place=grad_sync iteration=1 moves=1 issued=dp:1 waits=allreduce/dp/1/0,1")
    transcript.run("vital 1 place=forward iteration=1 moves=1")
    assert ended_after(transcript, 2000.0) == pytest.approx(300.0, abs=1.0)


def test_a_rank_for_which_nobody_waits_is_reported_but_not_ended() -> None:
    transcript = running()
    transcript.run("vital 0 place=forward waits=")
    lines = transcript.run("until 100")
    assert [line.split(" reason=")[0] for line in lines if "kind=slow" in line] == [
        "log g0 warning node=n0 rank=0 kind=slow what=rank",
        "log g0 warning node=n1 rank=1 kind=slow what=rank",
    ]
    assert all("nobody waits for it" in line for line in lines if "kind=slow" in line)
    assert not any("failure" in line for line in lines)


def test_standstills_during_a_recovery_do_not_count() -> None:
    transcript = running()
    transcript.run("until 50")
    transcript.run("n0 WorkerExited rank=0 status=-9")
    assert transcript.coordinator.state == "fencing"
    transcript.run("until 65")
    transcript.run("n0 FenceAck own=0@0.0 hosted=1@0.0")
    transcript.run("n1 FenceAck workers=1:0.0 own=1@0.0 hosted=0@0.0")
    for command in ("n0 Constructed rank=0", "n0 StoreReady rank=0", "n1 StoreReady rank=1"):
        transcript.run(command)
    for rank in (0, 1):
        transcript.run(f"n{rank} Rebuilt rank={rank}")
        transcript.run(f"n{rank} Restored rank={rank}")
        transcript.run(f"n{rank} Committed version=0.0")
    assert transcript.coordinator.state == "running"
    assert ended_after(transcript, 100.0) == pytest.approx(60.0, abs=1.0)
    assert transcript.coordinator.job.generation == 2


def test_ranks_of_a_silent_node_are_not_blamed() -> None:
    """Nothing is seen of them any more: the node is lost by its silence, which is another thing."""
    transcript = running()
    transcript.run("silence n1")
    lines = transcript.run("until 10.5")
    assert [line for line in lines if "kind=slow" in line] == []
    assert any("kind=node_lost" in line and "no sign of life for 10 s" in line for line in lines)


def test_a_late_answer_about_a_stack_is_told_and_an_unknown_one_is_not() -> None:
    transcript = running()
    transcript.run("until 11")
    transcript.run("vital 1 moves=9")
    transcript.run("until 12")
    assert "kind=stack" in transcript.run("n1 Inspected rank=1 number=1 stack=read_in_data.py:3")[0]
    assert transcript.run("n1 Inspected rank=1 number=1 stack=read_in_data.py:3") == []
    assert transcript.run("n1 Inspected rank=1 number=77 stack=read_in_data.py:3") == []


def test_the_coordinator_forgives_ranks_the_time_in_which_it_did_not_look() -> None:
    transcript = running()
    transcript.run("until 30")
    transcript.now += 1000.0
    assert "deadlines are moved" in transcript.run("tick")[0]
    assert transcript.coordinator.state == "running"


def test_status_shows_every_rank_and_how_busy_nodes_are() -> None:
    transcript = running()
    for iteration in (3, 4, 5):
        transcript.run(f"vital 1 iteration={iteration} moves={iteration} busy=0.{iteration}")
        transcript.run("tick")
    transcript.run("until 5")
    status = transcript.coordinator.job.status()
    assert status["ranks"][0] == {
        "rank": 0,
        "node": "n0",
        "place": "grad_sync",
        "iteration": 2,
        "still_s": 5.0,
        "waits": ["allreduce of dp"],
    }
    assert status["nodes"]["n1"]["busy_s"] == 0.4
    assert "busy_s" not in status["nodes"]["n0"]


def test_the_longest_standstill_is_forgotten_after_some_steps() -> None:
    pace = Pace()
    pace.note_standstill(20.0)
    pace.note_standstill(3.0)
    for _ in range(STEPS - 1):
        pace.note_step()
    assert pace.longest_standstill == 20.0
    pace.note_step()
    assert pace.longest_standstill == 0.0


@pytest.mark.parametrize(("gap", "timeout"), [(1.0, 10.0), (4.0, 12.0), (6.0, 18.0), (9.0, 20.0)])
def test_a_node_that_came_back_from_a_silence_may_be_silent_for_longer(gap: float, timeout: float) -> None:
    transcript = running()
    transcript.run("silence n1")
    transcript.run(f"until {gap}")
    transcript.silent.clear()
    transcript.run("tick")
    heard = transcript.now
    transcript.run("silence n1")
    transcript.run(f"until {heard + timeout - 0.1}")
    assert transcript.coordinator.state == "running"
    transcript.run(f"until {heard + timeout}")
    assert transcript.coordinator.state == "fencing"


def test_a_silence_is_forgotten_after_ten_minutes() -> None:
    transcript = running()
    transcript.run("silence n1")
    transcript.run("until 6")
    transcript.silent.clear()
    transcript.vitals.clear()
    transcript.run("until 607")
    deadlines = transcript.coordinator.job.config.deadlines
    assert transcript.coordinator.job.members.members["n1"].timeout_s(deadlines) == 10.0


def test_what_the_page_on_timeouts_advises_is_accepted() -> None:
    text = TIMEOUTS.read_text(encoding="utf-8")
    advice = text.partition("## Which to change")[2].partition("\n## ")[0]
    bullets = advice.split("\n- ")[1:]
    found = [dict(re.findall(r"(\w+)=(\d+)", bullet)) for bullet in bullets]
    assert sum(map(len, found)) >= 8
    for options in found:
        Deadlines.from_options({name: float(value) for name, value in options.items()})
