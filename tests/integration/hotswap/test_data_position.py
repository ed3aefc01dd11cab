"""Where in the data a recovered job goes on, told by the ids of the samples and not by what was computed from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.integration.hotswap.judging import assert_recovered
from tests.jobs import Ended, Job, JobServer

SCRIPT = Path(__file__).with_name("pretrain_with_ids.py")
MICRO_BATCH, MICRO_BATCHES, REPLICAS, ITERATIONS = 2, 2, 2, 7
ALL_FOR_A_RANK = MICRO_BATCH * MICRO_BATCHES


def trained_on(directory: Path, ranks: tuple[int, ...]) -> dict[int, list[int]]:
    """Sample ids by iteration, of all the replicas of one pipeline stage: what each iteration's last attempt drew.

    An attempt that was interrupted drew some, the last one of a process all that there are for its rank.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        drawn: dict[int, list[int]] = defaultdict(list)
        for file in sorted(directory.glob(f"rank{rank}.*")):  # the seat's processes, the first one first
            for line in file.read_text().splitlines():
                iteration, index = line.split()
                drawn[int(iteration)].append(int(index))
        for iteration, indices in drawn.items():
            found[iteration] += indices[-ALL_FOR_A_RANK:]
    return found


def test_f6_no_sample_is_skipped_or_seen_twice(
    jobs: JobServer,
    arguments: Callable[..., list[str]],
    undisturbed: Callable[..., Ended],
    run_dir: Path,
    tmp_path: Path,
) -> None:
    """A node is lost before and after ranks have drawn, the process of a survivor too, another in the replay."""
    faults = (
        "kill-node:node=n0,step=3,phase=data",
        "kill-rank:rank=4,step=5,phase=optimizer",
        "kill-node:node=n2,step=6,phase=post_step",
    )
    argv = [*arguments("fp32_dropout", train_iters=ITERATIONS), "--deadpool"]
    job = Job(
        run_dir=run_dir,
        argv=argv,
        script=str(SCRIPT),
        spares=2,
        faults=faults,
        environment={"DEADPOOL_TEST_IDS": str(tmp_path)},
    )
    ended = jobs.run(job)
    assert_recovered(ended, undisturbed("fp32_dropout", train_iters=ITERATIONS), failures=3)
    # Tensor rank 0 of both replicas of the first and of the last pipeline stage; the others are given what these read.
    for stage in ((0, 2), (4, 6)):
        by_iteration = trained_on(tmp_path, stage)
        size = ALL_FOR_A_RANK * REPLICAS
        for number in range(ITERATIONS):
            ids = range(number * size, (number + 1) * size)
            assert sorted(by_iteration[number + 1]) == list(ids), f"ranks {stage}, iteration {number + 1}"
    replaced = [name for name in tmp_path.iterdir() if name.name.startswith(("rank0.", "rank4."))]
    assert len(replaced) == 5, "two seats of one process each, three more where they were lost"
