"""Situations of docs/faults.md that need a whole job with the real trainer; the numbers are the page's."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.hotswap.judging import (
    assert_recovered,
    assert_survivors_kept_their_processes,
    difference,
    seats_of,
)
from tests.integration.hotswap.processes import send, steps_recorded, until
from tests.jobs import Ended, Job, JobServer

Make = Callable[..., list[str]]
Calm = Callable[..., Ended]
SPARE_STOPPED_S = 2.0


@pytest.fixture
def other_jobs() -> Iterator[JobServer]:
    """A second server: its jobs run beside the first one's."""
    server = JobServer()
    yield server
    server.close()


def test_f2_a_worker_fails_by_itself_while_a_node_is_being_replaced(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    """Both are handled, nobody else is torn down, and the one spare does for it."""
    faults = (
        "kill-node:node=n0,step=4,phase=backward",
        "raise-rank:rank=5,step=3,phase=recovery",  # at the restore of the version before
    )
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments("fp32_dropout"), "--deadpool"], spares=1, faults=faults))
    assert_recovered(ended, undisturbed("fp32_dropout"), failures=2)
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n0") | {5})
    verdicts = {event["node"]: event["class"] for event in ended.events("failure_classified")}
    assert verdicts == {"n0": "permanent", "n2": "transient"}
    assert [event["node"] for event in ended.events("node_lost")] == ["n0"]


def test_f10_f11_f12_everybody_is_out_of_every_dead_collective_within_a_second(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    """A killed node leaves tensor-, pipeline- and data-parallel groups hanging at once, among them pipeline receives
    whose senders are alive and were aborted in another group. The groups' own timeout is ten minutes."""
    faults = ("kill-node:node=n1,step=3,phase=forward", "kill-node:node=n2,step=5,phase=grad_sync")
    argv = [*arguments("bf16_overlaps", distributed_timeout_minutes=10), "--deadpool"]
    ended = jobs.run(Job(run_dir=run_dir, argv=argv, spares=2, faults=faults))
    assert_recovered(ended, undisturbed("bf16_overlaps"), failures=2)
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n1") | seats_of("n2"))
    out = ended.events("unwound")
    assert [event["nodes"] for event in out] == [3, 3] and all(event["seconds"] < 1.0 for event in out)
    for recovery in ended.events("recovery_done"):
        seconds = recovery["seconds"]
        assert seconds["detect"] + seconds["classify"] + seconds["fence"] < 1.0 and seconds["total"] < 30.0


def test_f18_a_spare_that_is_slow_delays_and_kills_nobody(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    """All of its processes stand still while the others wait for it."""

    def has(event: str) -> bool:
        path = run_dir / "events.jsonl"
        return path.exists() and f'"event": "{event}"' in path.read_text(encoding="utf-8")

    def hold_the_spare() -> None:
        until(lambda: steps_recorded(run_dir) >= 1, "a step")
        until(lambda: has("node_lost"), "the loss of a node")
        pids = [pid for pid, name in jobs.processes().items() if name.endswith(" n4")]
        assert pids
        for pid in pids:
            send(pid, signal.SIGSTOP)
        time.sleep(SPARE_STOPPED_S)
        for pid in pids:
            send(pid, signal.SIGCONT)

    fault = "kill-node:node=n3,step=4,phase=backward"
    job = Job(run_dir=run_dir, argv=[*arguments("fp32_dropout"), "--deadpool"], spares=1, faults=(fault,))
    holder = threading.Thread(target=hold_the_spare)
    holder.start()
    ended = jobs.run(job)
    holder.join()
    assert_recovered(ended, undisturbed("fp32_dropout"), failures=1)
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n3"))
    (recovery,) = ended.events("recovery_done")
    assert recovery["seconds"]["total"] > SPARE_STOPPED_S / 2


def test_f22_two_jobs_of_one_user_on_the_same_machine_one_of_which_crashes(
    jobs: JobServer, other_jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    """Same node names, same script, same folder; nothing of the crashed one is left, and the other one recovers."""
    argv = [*arguments("fp32_dropout"), "--deadpool"]
    crashing = Job(
        run_dir=run_dir.with_name("crashing"),
        argv=argv,
        spares=1,
        interrupt_after_step=2,
        interrupt_with=signal.SIGKILL,
    )
    crashed: list[Ended] = []
    beside = threading.Thread(target=lambda: crashed.append(other_jobs.run(crashing)))
    beside.start()
    fault = "kill-node:node=n1,step=5,phase=forward"
    ended = jobs.run(Job(run_dir=run_dir, argv=argv, spares=1, faults=(fault,)))
    beside.join()
    assert crashed and crashed[0].code == -signal.SIGKILL
    until(lambda: not other_jobs.processes(), "the crashed job's processes are gone", seconds=10.0)
    assert_recovered(ended, undisturbed("fp32_dropout"), failures=1)
    again = other_jobs.run(Job(run_dir=run_dir.with_name("again"), argv=argv, spares=1))
    assert again.code == 0 and difference(again, undisturbed("fp32_dropout")) is None
