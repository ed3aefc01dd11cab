"""Replicators are killed under the real trainer: training goes on, and nobody is blamed unless it happens again and
again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from deadpool_ext.control.agent_replicator import DEATH_LIMIT
from tests.integration.hotswap.judging import assert_recovered, assert_survivors_kept_their_processes, seats_of
from tests.integration.hotswap.processes import run_beside, send, steps_recorded, until
from tests.jobs import Ended, Job, JobServer

ITERATIONS = 10


def kill_replicator(jobs: JobServer, node: str) -> None:
    """SIGKILL the one there is now, and wait until it is gone."""
    until(lambda: f"dp-repl {node}" in jobs.processes().values(), f"a replicator of {node}")
    pid = jobs.named(f"dp-repl {node}")
    send(pid, signal.SIGKILL)
    until(lambda: pid not in jobs.processes(), f"the end of {pid}")


def restarts(ended: Ended) -> list[str]:
    """Nodes that started another replicator, in order."""
    return [event["node"] for event in ended.events("warning") if event.get("kind") == "replicator_restarted"]


def test_killed_during_set_up_and_while_training(
    jobs: JobServer, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], run_dir: Path
) -> None:
    """Half-way through a stream, two at once, at the gate: no new generation, no failure, nothing computed twice."""
    faults = (
        "kill-replicator:node=n1,step=2,phase=h2h",
        "kill-replicator:node=n2,step=4,phase=forward",
        "kill-replicator:node=n3,step=4,phase=forward",
        "kill-replicator:node=n0,step=6,phase=gate",
    )
    argv = [*arguments("bf16_overlaps", train_iters=ITERATIONS), "--deadpool"]
    ended = run_beside(jobs, Job(run_dir=run_dir, argv=argv, faults=faults), lambda: kill_replicator(jobs, "n0"))
    assert_recovered(ended, undisturbed("bf16_overlaps", train_iters=ITERATIONS), failures=0)
    assert restarts(ended)[:2] == ["n0", "n1"] and sorted(restarts(ended)[2:]) == ["n0", "n2", "n3"]
    assert ended.final()["generations"] == 1 and ended.final()["failures"] == []
    assert not ended.events("degraded") and not ended.events("failure_detected")
    assert len(ended.steps()) == ITERATIONS


def test_killed_while_a_node_is_replaced(
    jobs: JobServer, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], run_dir: Path
) -> None:
    """On the survivor that holds the lost node's replicas, when the fence begins, and on the newcomer, when it
    fetches them."""

    def has(event: str) -> bool:
        path = run_dir / "events.jsonl"
        return path.exists() and f'"event": "{event}"' in path.read_text(encoding="utf-8")

    def strike() -> None:
        until(lambda: has("fence"), "a fence")
        kill_replicator(jobs, "n3")
        until(lambda: has("plan"), "a plan")
        kill_replicator(jobs, "n4")

    job = Job(
        run_dir=run_dir,
        argv=[*arguments("fp32_dropout", train_iters=ITERATIONS), "--deadpool"],
        spares=1,
        faults=("kill-node:node=n2,step=3,phase=backward",),
    )
    ended = run_beside(jobs, job, strike)
    assert_recovered(ended, undisturbed("fp32_dropout", train_iters=ITERATIONS), failures=1)
    assert sorted(restarts(ended)) == ["n3", "n4"]
    assert_survivors_kept_their_processes(ended, seats_of("n2"))
    assert ended.events("redundancy_restored")


def test_a_node_whose_replicator_keeps_dying_is_replaced(
    jobs: JobServer, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], run_dir: Path
) -> None:
    def strike() -> None:
        until(lambda: steps_recorded(run_dir) >= 1, "a step")
        for _ in range(DEATH_LIMIT + 1):
            kill_replicator(jobs, "n1")

    iterations = 16  # long enough for all the deaths
    job = Job(run_dir=run_dir, argv=[*arguments("fp32_dropout", train_iters=iterations), "--deadpool"], spares=1)
    ended = run_beside(jobs, job, strike)
    assert_recovered(ended, undisturbed("fp32_dropout", train_iters=iterations), failures=1)
    assert restarts(ended) == ["n1"] * DEATH_LIMIT
    (lost,) = ended.events("node_lost")
    assert lost["node"] == "n1"
    assert_survivors_kept_their_processes(ended, seats_of("n1"))
