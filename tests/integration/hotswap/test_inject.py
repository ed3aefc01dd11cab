"""Faults given to a job that runs, with the real trainer; slow nodes are found meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deadpool_ext.cli.main import run as deadpool
from tests.integration.hotswap.judging import assert_recovered, assert_survivors_kept_their_processes, seats_of
from tests.jobs import Ended, Job, JobServer

STEPS = 40
WAIT_S = 120.0
SWAP_SLOW = ("--deadpool-swap-slower-than", "1.5")


class Watched:
    """A run directory that is being written."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def wait(self, what: str, found: Callable[[list[dict[str, Any]]], bool], file: str = "events.jsonl") -> None:
        """Until the records of ``file`` show it."""
        end = time.monotonic() + WAIT_S
        while not found(self.records(file)):
            assert time.monotonic() < end, f"not seen within {WAIT_S} s: {what}"
            time.sleep(0.05)

    def wait_for_event(self, name: str, **fields: Any) -> None:
        self.wait(name, lambda events: any({"event": name, **fields}.items() <= event.items() for event in events))

    def records(self, file: str) -> list[dict[str, Any]]:
        path = self.run_dir / file
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def step(self) -> int:
        return max((record["iteration"] for record in self.records("steps.jsonl")), default=0)


def test_faults_are_injected_into_a_running_job(
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank at a place that nothing watched at the start, a slow node, which is replaced between two steps as asked
    for, then a whole node at once; what cannot be is refused. The trajectory is the undisturbed one."""
    calm = undisturbed("fp32_dropout", train_iters=STEPS)
    job = Job(run_dir=run_dir, argv=[*arguments("fp32_dropout", train_iters=STEPS), "--deadpool", *SWAP_SLOW], spares=1)
    watched = Watched(run_dir)

    def inject(spec: str) -> tuple[int, str]:
        code = deadpool(["inject", str(run_dir), spec])
        told = capsys.readouterr()
        return code, (told.out + told.err).strip()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(jobs.run, job)
        watched.wait("a second step", lambda steps: len(steps) >= 2, "steps.jsonl")
        step = watched.step + 4
        assert inject(f"kill-rank:rank=3,step={step},phase=grad_sync") == (
            0,
            f"kill-rank on rank 3 in step {step}, grad_sync",
        )
        code, told = inject("kill-rank:rank=3,step=1")
        assert code == 2 and "step 1 is over" in told
        watched.wait_for_event("recovery_done", generation=1)
        assert inject("slow-node:node=n2,seconds=0.4") == (0, "slow-node on n2 now")
        watched.wait_for_event("warning", kind="slow_node", node="n2")
        watched.wait_for_event("spare_joined", node="n2")  # n4 holds its seats, and it is a spare itself
        assert inject("kill-node:node=n1") == (0, "kill-node on n1 now")
        ended = running.result()
    assert_recovered(ended, calm, failures=2)
    assert_survivors_kept_their_processes(ended, seats_of("n1") | seats_of("n2"))
    assert {seat["node"] for seat in ended.final()["seats"]} == {"n0", "n2", "n3", "n4"}
    first = ended.events("fault_injected")[0]
    assert (first["rank"], first["fault"]["step"], first["fault"]["phase"]) == (3, step, "grad_sync")
    assert [event["node"] for event in ended.events("warning") if event.get("kind") == "slow_node"] == ["n2"]
    assert ended.final()["faults_missed"] == []
