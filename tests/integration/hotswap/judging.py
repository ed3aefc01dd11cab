"""What must hold of a disturbed run, whatever disturbed it."""

from __future__ import annotations

from deadpool_ext.rundir.compare import first_difference, read_run
from tests.jobs import Ended


def difference(disturbed: Ended, undisturbed: Ended) -> str | None:
    """What ``deadpool compare`` would say, or None."""
    return first_difference(read_run(undisturbed.job.run_dir), read_run(disturbed.job.run_dir))


def assert_recovered(disturbed: Ended, undisturbed: Ended, failures: int) -> None:
    """Bit-identical, every failure recovered from, at most one completed iteration recomputed each (INV-5, INV-6)."""
    assert disturbed.code == 0, disturbed.output
    assert difference(disturbed, undisturbed) is None
    recoveries = disturbed.events("recovery_done")
    assert sum(len(recovery["failures"]) for recovery in recoveries) == failures, disturbed.output
    assert all(recovery["steps_replayed"] <= 1 for recovery in recoveries)
    # Newcomers built alone: upstream's set-up was answered locally, not one operation went to a survivor.
    newcomers = disturbed.events("constructed")
    # (A recovery that another failure overtook may have built some more.)
    assert {event["rank"] for event in newcomers} >= {rank for done in recoveries for rank in done["new_workers"]}
    assert all(event["solo_ops"] > 0 and event["remote_ops"] == 0 for event in newcomers)


def assert_survivors_kept_their_processes(disturbed: Ended, replaced: set[int]) -> None:
    """Same pid and start time for every seat that was not on a lost node; another process for those that were."""
    for seat in disturbed.final()["seats"]:
        start, end = seat["process_start"], seat["process_end"]
        assert (start == end) == (seat["rank"] not in replaced), seat


def seats_of(node: str, ranks_per_node: int = 2) -> set[int]:
    """The seats that a node holds at the start of a job."""
    first = int(node.removeprefix("n")) * ranks_per_node
    return set(range(first, first + ranks_per_node))
