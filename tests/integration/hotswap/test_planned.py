"""``deadpool swap`` and ``deadpool drain`` on a running job: nothing is computed twice, and nobody notices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deadpool_ext.cli.main import run as deadpool
from tests.integration.hotswap.judging import assert_survivors_kept_their_processes, difference, seats_of
from tests.integration.hotswap.processes import run_beside, steps_recorded, until
from tests.jobs import Ended, Job, JobServer

ITERATIONS = 24


def test_swapped_to_and_fro_and_drained(
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def orders() -> None:
        place = str(run_dir)
        until(lambda: steps_recorded(run_dir) >= 2, "two steps")
        assert deadpool(["swap", place, "--node", "n4"]) == 2  # a spare has nothing to give
        assert deadpool(["swap", place, "--node", "n3", "--to", "n2"]) == 2
        assert deadpool(["swap", place, "--node", "n3"]) == 0
        assert deadpool(["swap", place, "--node", "n4", "--to", "n3"]) == 0
        assert deadpool(["drain", place, "--node", "n1"]) == 0
        assert deadpool(["drain", place, "--node", "n0"]) == 2  # nobody is left to take over

    argv = [*arguments("bf16_overlaps", train_iters=60), "--deadpool"]
    ended = run_beside(jobs, Job(run_dir=run_dir, argv=argv, spares=1), orders)
    assert ended.code == 0, ended.output
    told = capsys.readouterr()
    assert "seats 6, 7 of n3 are on n4" in told.out and "seats 2, 3 of n1 are on n4" in told.out
    assert "n1 has left" in told.out
    assert "n4 is a spare, and has no seats to give" in told.err and "n2 is no warm spare" in told.err
    assert difference(ended, undisturbed("bf16_overlaps", train_iters=60)) is None
    # Every iteration was computed once, though the seats changed hands three times.
    assert [step["iteration"] for step in ended.steps()] == list(range(1, 61))
    done = ended.events("recovery_done")
    assert [swap["steps_replayed"] for swap in done] == [0, 0, 0] and all(swap["planned"] for swap in done)
    assert not ended.events("failure_detected") and ended.final()["failures"] == []
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n3") | seats_of("n1"))
    assert not ended.events("warning")
    (left,) = ended.events("spare_left")
    assert left["node"] == "n1" and "drained" in left["reason"]


def test_a_node_dies_while_a_spare_prepares_for_another(
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The swap is given up, and its spare, warm again, takes over from the node that died."""

    def orders() -> None:
        place = str(run_dir)
        until(lambda: steps_recorded(run_dir) >= 2, "two steps")
        asked = threading.Thread(target=lambda: codes.append(deadpool(["swap", place, "--node", "n3"])))
        asked.start()
        until(lambda: "swap_begun" in (run_dir / "events.jsonl").read_text(), "a swap")
        assert deadpool(["inject", place, "kill-node:node=n1"]) == 0
        asked.join()

    codes: list[int] = []
    argv = [*arguments("fp32_dropout", train_iters=ITERATIONS), "--deadpool"]
    ended = run_beside(jobs, Job(run_dir=run_dir, argv=argv, spares=1), orders)
    assert ended.code == 0, ended.output
    assert codes == [1] and "was given up: lost node n1" in capsys.readouterr().err
    assert difference(ended, undisturbed("fp32_dropout", train_iters=ITERATIONS)) is None
    assert_survivors_kept_their_processes(ended, replaced=seats_of("n1"))
    (recovery,) = ended.events("recovery_done")
    assert "planned" not in recovery and recovery["steps_replayed"] <= 1
