"""Slow nodes: told apart from nodes that wait for them, from noise, and from unequal work."""

from __future__ import annotations

from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.stragglers import FORGET_S, STEPS, find
from tests.unit.protocol.transcript import Transcript

LAYOUT = plain_layout(ranks_per_node=2, tensor_parallel=2, data_parallel=2, pipeline_parallel=2)
NODES = ["n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3"]  # n0 and n1 do the same work, n2 and n3 too


def busy(**seconds: float) -> dict[int, list[float]]:
    return {rank: [seconds.get(node, 0.2)] * STEPS for rank, node in enumerate(NODES)}


def test_a_node_that_needs_longer_than_others_for_the_same_work_is_slow() -> None:
    (slow,) = find(busy(n1=0.5), NODES, LAYOUT, 1.5)
    assert (slow.node, slow.busy_s, slow.others_s) == ("n1", 0.5, 0.2)
    assert "n1 needs 0.5 s for its own part of a step, 2.5 times the 0.2 s of other nodes" in slow.reason


def test_a_pipeline_stage_with_more_work_is_not_slow() -> None:
    assert find(busy(n2=0.5, n3=0.5), NODES, LAYOUT, 1.5) == []


def test_one_fast_step_in_between_or_too_few_steps_or_noise_say_nothing() -> None:
    values = busy(n1=0.5)
    values[2][3] = values[3][3] = 0.2
    assert find(values, NODES, LAYOUT, 1.5) == []
    values = busy(n1=0.5)
    del values[3][0]
    assert find(values, NODES, LAYOUT, 1.5) == []
    assert find({rank: [0.001 * (1 + rank)] * STEPS for rank in range(8)}, NODES, LAYOUT, 1.5) == []


def test_one_slow_rank_of_two_is_not_the_node() -> None:
    values = busy()
    values[2] = [0.25] * STEPS
    assert find(values, NODES, LAYOUT, 1.5) == []


def test_without_data_parallel_peers_elsewhere_other_nodes_are_the_yardstick() -> None:
    layout = plain_layout(ranks_per_node=1, tensor_parallel=1, data_parallel=1, pipeline_parallel=3)
    values = {0: [0.2] * STEPS, 1: [0.2] * STEPS, 2: [0.7] * STEPS}
    assert [slow.node for slow in find(values, ["a", "b", "c"], layout, 1.5)] == ["c"]


def test_it_is_reported_once_and_again_after_it_was_fast() -> None:
    transcript = Transcript()
    for command in ("config nodes=3 spares=1 dp=3", "start"):
        transcript.run(command)
    moves, iteration = 1, 1

    def steps(count: int, slow_s: float) -> list[str]:
        nonlocal moves, iteration
        lines: list[str] = []
        for _ in range(count):
            moves, iteration = moves + 1, iteration + 1
            for rank in range(3):
                seconds = slow_s if rank == 1 else 0.2
                transcript.run(f"vital {rank} place=forward iteration={iteration} moves={moves} busy={seconds}")
            lines += transcript.run("tick")
            lines += transcript.run(f"n2 StepDone rank=2 iteration={iteration - 1}")
        return [line for line in lines if "slow_node" in line]

    assert steps(STEPS + 5, 0.2) == []
    (line,) = steps(STEPS + 5, 0.6)
    assert "warning node=n1 kind=slow_node reason=n1 needs 0.6 s" in line
    assert steps(3, 0.2) + steps(STEPS + 1, 0.6) == []
    transcript.coordinator.job.vitals.slow["n1"] -= FORGET_S + 1  # that long ago
    assert steps(1, 0.2) == []
    assert len(steps(STEPS + 1, 0.6)) == 1
