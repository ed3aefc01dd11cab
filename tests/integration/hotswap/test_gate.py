"""The gate holds the optimizer step until every copy of the version before is in place; without it work is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.hotswap.runtime import SABOTAGE_VARIABLE
from tests.integration.hotswap.judging import assert_recovered
from tests.integration.hotswap.processes import send, steps_recorded, until
from tests.jobs import Ended, Job, JobServer


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no_gate"])
def test_a_node_dies_whose_copies_were_held_up(
    gate: bool,
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
) -> None:
    """n2's replicator is stopped, so nothing of n2 reaches its peer any more; later n2 dies.

    With the gate the job waits and then goes on from the last version that is safe. Without it the job runs ahead,
    overwrites what the others still had of that version, and no recovery is possible.
    """
    iterations = 12
    argv = [*arguments("fp32_dropout", train_iters=iterations), "--deadpool"]
    environment = {} if gate else {SABOTAGE_VARIABLE: "gate"}
    result: list[Ended] = []
    job = Job(run_dir=run_dir, argv=argv, spares=1, environment=environment)
    thread = threading.Thread(target=lambda: result.append(jobs.run(job)))
    thread.start()
    until(lambda: steps_recorded(run_dir) >= 2, "two steps")
    send(jobs.named("dp-repl n2"), signal.SIGSTOP)
    before = steps_recorded(run_dir)
    if gate:
        until(lambda: '"still_waiting": true' in (run_dir / "events.jsonl").read_text(), "a wait at the gate")
    else:
        until(lambda: steps_recorded(run_dir) >= before + 5, "five steps more")
    after = steps_recorded(run_dir)
    send(jobs.named("dp-agent n2"), signal.SIGKILL)
    thread.join()
    (ended,) = result
    if gate:
        assert after <= before + 2
        assert_recovered(ended, undisturbed("fp32_dropout", train_iters=iterations), failures=1)
    else:
        assert ended.code == 3 and "no version of one lineage is held for every seat" in ended.output, ended.output
