"""Processes that live and do not go on: found by what they show of themselves, named, and restarted where they are.

The groups' own timeout is ten minutes in all of these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_ext.control.stacks import STACK_SIGNAL, catches
from tests.integration.hotswap.judging import (
    assert_recovered,
    assert_survivors_kept_their_processes,
    difference,
    seats_of,
)
from tests.integration.hotswap.processes import send
from tests.jobs import Ended, Job, JobServer

Make = Callable[..., list[str]]
Calm = Callable[..., Ended]

#: A standstill is reported after a second and ended after three.
IMPATIENT = {"heartbeat_s": 0.2, "slow_s": 1.0, "hang_s": 3.0, "hang_factor": 1.0}


def reported(ended: Ended, kind: str) -> dict[int | None, dict[str, Any]]:
    """Warnings of this kind, by rank."""
    return {event["rank"]: event for event in ended.events("warning") if event.get("kind") == kind}


def keep_asking(jobs: JobServer, over: threading.Event, asked: set[int], but: str = "dp-r5 ") -> None:
    """Have all ranks write their stacks all the time, as if they hung: they must not notice. ``asked``: their pids."""
    while not over.wait(0.02):
        for pid, name in jobs.processes().items():
            if (
                name.startswith("dp-r")
                and name[4].isdecimal()
                and not name.startswith(but)
                and catches(pid, STACK_SIGNAL)
            ):
                with contextlib.suppress(ProcessLookupError):
                    send(pid, STACK_SIGNAL)
                    asked.add(pid)


def test_a_rank_that_hangs_is_named_with_its_place_and_stack_and_restarted_on_its_node(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    """A process that is stopped, a data loader that blocks, native code that keeps the interpreter lock, and a rank
    that does not come to its collective, one after the other."""
    faults = (
        "stop-rank:rank=3,step=2,phase=backward",
        "stuck-rank:rank=4,step=3,phase=data",
        "hold-gil:rank=0,step=5,phase=forward,seconds=100",
        "stuck-rank:rank=6,step=6,phase=grad_sync",
    )
    argv = [*arguments("fp32_dropout", distributed_timeout_minutes=10), "--deadpool"]
    ended = jobs.run(Job(run_dir=run_dir, argv=argv, spares=1, faults=faults, deadlines=IMPATIENT))
    assert_recovered(ended, undisturbed("fp32_dropout"), failures=4)
    assert_survivors_kept_their_processes(ended, replaced={3, 4, 0, 6})
    assert not ended.events("node_lost")
    hangs = ended.events("failure_classified")
    assert [(hang["rank"], hang["kind"], hang["class"]) for hang in hangs] == [
        (rank, "hang", "transient") for rank in (3, 4, 0, 6)
    ]
    slow = reported(ended, "slow")
    places = {rank: (event["place"], event["iteration"]) for rank, event in slow.items()}
    assert places == {3: ("backward", 2), 4: ("data", 3), 0: ("forward", 5), 6: ("grad_sync", 6)}
    assert {rank: len(event["waiting"]) for rank, event in slow.items()} == dict.fromkeys(slow, 7)
    stacks = reported(ended, "stack")
    assert "stopped by a signal" in stacks[3]["reason"] and "process state T" in hangs[0]["evidence"]
    assert any("_fetching" in frame for frame in stacks[4]["stack"])
    assert stacks[0]["stack"][0].startswith("hold_gil ")
    assert any("finalize_model_grads" in frame for frame in stacks[6]["stack"])
    for recovery in ended.events("recovery_done"):
        assert "replica" not in recovery["sources"] and recovery["seconds"]["total"] < 30
    assert all(event["seconds"] < 1.0 for event in ended.events("unwound"))


def test_a_node_whose_agent_or_everything_is_stopped_is_replaced(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    """Its silence is found. Where only the agent is stopped its ranks would go on training."""
    faults = ("stop-node:node=n1,step=3,phase=forward", "stop-agent:node=n2,step=5,phase=backward")
    deadlines = IMPATIENT | {"node_timeout_s": 2.0, "node_timeout_max_s": 4.0}
    argv = [*arguments("bf16_overlaps", distributed_timeout_minutes=10), "--deadpool"]
    ended = jobs.run(Job(run_dir=run_dir, argv=argv, spares=2, faults=faults, deadlines=deadlines))
    assert_recovered(ended, undisturbed("bf16_overlaps"), failures=2)
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n1") | seats_of("n2"))
    assert [event["node"] for event in ended.events("node_lost")] == ["n1", "n2"]
    assert all(event["class"] == "permanent" for event in ended.events("failure_classified"))
    assert all(event["seconds"] < 1.0 for event in ended.events("unwound"))


@pytest.mark.parametrize(
    ("seconds", "deadlines"),
    [(4, {"heartbeat_s": 0.2, "slow_s": 1.0, "hang_s": 20.0}), pytest.param(30, {}, marks=pytest.mark.slow)],
    ids=["four_seconds", "thirty_seconds_at_default_deadlines"],
)
def test_f9_a_stall_is_reported_with_who_and_where_and_punished_with_nothing(
    seconds: int, deadlines: dict[str, float], jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    faults = (f"hold-gil:rank=5,step=4,phase=forward,seconds={seconds}",)
    job = Job(
        run_dir=run_dir,
        argv=[*arguments("fp32_dropout", distributed_timeout_minutes=10), "--deadpool"],
        spares=1,
        faults=faults,
        deadlines=deadlines,
    )
    over, asked = threading.Event(), set[int]()
    nosy = threading.Thread(target=keep_asking, args=(jobs, over, asked))
    nosy.start()
    try:
        ended = jobs.run(job)
    finally:
        over.set()
        nosy.join()
    assert len(asked) == 7
    assert ended.code == 0 and difference(ended, undisturbed("fp32_dropout")) is None
    assert_survivors_kept_their_processes(ended, replaced=set())
    assert ended.final()["generations"] == 1 and not ended.events("failure_detected")
    slow = reported(ended, "slow")
    assert {rank: (event["place"], event["iteration"]) for rank, event in slow.items()} == {5: ("forward", 4)}
    assert reported(ended, "stack")[5]["stack"][0].startswith("hold_gil ")
    assert reported(ended, "slow_over")[5]["seconds"] == pytest.approx(seconds, abs=2)
