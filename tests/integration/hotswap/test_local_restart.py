"""One process fails and its node is healthy: forked again there, restored from the node's memory, no spare used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.hotswap.judging import (
    assert_recovered,
    assert_survivors_kept_their_processes,
    difference,
    seats_of,
)
from tests.jobs import Ended, Job, JobServer

Make = Callable[..., list[str]]
Calm = Callable[..., Ended]


@pytest.mark.parametrize(
    ("fault", "evidence", "variant"),
    [
        ("kill-rank:rank=3,step=4,phase=backward", "process exit", "bf16_overlaps"),
        ("kill-rank:rank=6,step=4,phase=d2h", "process exit", "fp32_dropout"),
        ("exit-rank:rank=0,step=4,phase=optimizer", "process exit", "bf16_overlaps"),
        ("raise-rank:rank=5,step=4,phase=forward", "script", "fp32_dropout"),
        ("kill-rank:rank=1,step=4,phase=gate", "process exit", "fp32_dropout"),
        ("kill-rank:rank=7,step=4,phase=h2h", "process exit", "bf16_overlaps"),
    ],
    ids=["killed_backward", "killed_copy", "exited_optimizer", "raised_forward", "killed_gate", "killed_stream"],
)
def test_a_worker_is_forked_again_on_its_node(
    fault: str, evidence: str, variant: str, jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    # A spare is there, and stays one.
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments(variant), "--deadpool"], spares=1, faults=(fault,)))
    assert_recovered(ended, undisturbed(variant), failures=1)
    rank = int(fault.partition("rank=")[2].partition(",")[0])
    assert_survivors_kept_their_processes(ended, replaced={rank})
    (classified,) = ended.events("failure_classified")
    assert (classified["class"], classified["evidence"], classified["rank"]) == ("transient", evidence, rank)
    assert not ended.events("node_lost")
    (recovery,) = ended.events("recovery_done")
    assert recovery["new_workers"] == [rank] and "replica" not in recovery["sources"]
    assert recovery["seconds"]["total"] < 30


def test_f8_a_sticky_device_error_restarts_every_process_that_has_it(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    fault = "sticky-device-error:node=n2,step=4,phase=backward"
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments("fp32_dropout"), "--deadpool"], faults=(fault,)))
    assert_recovered(ended, undisturbed("fp32_dropout"), failures=2)
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n2"))
    assert {event["evidence"] for event in ended.events("failure_classified")} == {"device error"}


def test_the_scripts_own_error_ends_the_job_after_one_restart(jobs: JobServer, arguments: Make, run_dir: Path) -> None:
    fault = "raise-rank:rank=2,step=3,phase=forward,times=9"
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments("fp32_dropout"), "--deadpool"], spares=1, faults=(fault,)))
    assert ended.code == 1
    assert ended.final()["generations"] == 2 and len(ended.events("fault_injected")) == 2
    assert "InjectedError: fault 0: an exception of the training script" in ended.output
    assert [event["class"] for event in ended.events("failure_classified")] == ["transient", "script"]
    log = (run_dir / "logs" / "n1" / "2.log").read_text()
    assert log.count("Traceback") >= 2


def test_a_node_whose_workers_die_again_and_again_is_replaced(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    faults = tuple(f"kill-rank:rank=2,step={step},phase=forward" for step in (2, 3, 4))
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments("bf16_overlaps"), "--deadpool"], spares=1, faults=faults))
    assert_recovered(ended, undisturbed("bf16_overlaps"), failures=3)
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n1"))
    classes = [event["class"] for event in ended.events("failure_classified")]
    assert classes == ["transient", "transient", "permanent"]


def test_a_node_that_fails_its_health_check_after_a_death_is_replaced(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path, tmp_path: Path
) -> None:
    # The user's script finds the node healthy at its start, and not any more once the worker died.
    seen = tmp_path / "seen"
    script = tmp_path / "check.sh"
    script.write_text(
        f'[ "$DEADPOOL_NODE" = n1 ] || exit 0\nif [ -e {seen} ]; then echo the link is down; exit 9; fi\ntouch {seen}\n'
    )
    argv = [*arguments("fp32_dropout"), "--deadpool", "--deadpool-health-check", f"sh {script}"]
    fault = "kill-rank:rank=3,step=4,phase=backward"
    ended = jobs.run(Job(run_dir=run_dir, argv=argv, spares=1, faults=(fault,)))
    assert_recovered(ended, undisturbed("fp32_dropout"), failures=2)
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n1"))
    (lost,) = ended.events("node_lost")
    assert "the link is down" in lost["reason"]


def test_f12_a_broken_connection_between_healthy_ends_replaces_nothing(
    jobs: JobServer, arguments: Make, undisturbed: Calm, run_dir: Path
) -> None:
    """Survivors are out of the dead collective within a second of the detection; group timeouts are ten minutes."""
    fault = "drop-connection:rank=4,step=4,phase=backward"
    ended = jobs.run(Job(run_dir=run_dir, argv=[*arguments("bf16_overlaps"), "--deadpool"], spares=1, faults=(fault,)))
    assert_recovered(ended, undisturbed("bf16_overlaps"), failures=1)
    assert_survivors_kept_their_processes(ended, replaced=set())
    (classified,) = ended.events("failure_classified")
    assert classified["kind"] == "collective_failed" and "all 4 nodes are well" in classified["evidence"]
    (out,) = ended.events("abort_done")
    assert out["seconds"] < 1.0
    assert difference(ended, undisturbed("bf16_overlaps")) is None
