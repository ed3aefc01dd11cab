"""Slow nodes: told apart from nodes that wait for them, from noise, and from unequal work."""

from __future__ import annotations

from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.stragglers import COOL_DOWN_S, FORGET_S, STEPS, find
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


class Slowly:
    """A job of three nodes of which n1 may be slow."""

    def __init__(self, more: str = "", spares: int = 1) -> None:
        self.transcript = Transcript()
        for command in (f"config nodes=3 spares={spares} dp=3 {more}", "start"):
            self.transcript.run(command)
        self.done = 0

    def steps(self, count: int, slow_s: float) -> list[str]:
        lines: list[str] = []
        for _ in range(count):
            self.done += 1
            for rank in range(3):
                busy_s = slow_s if rank == 1 else 0.2
                where = f"place=forward iteration={self.done + 1} moves={self.done}"
                self.transcript.run(f"vital {rank} {where} busy={busy_s}")
            lines += self.transcript.run("tick")
            lines += self.transcript.run(f"n2 StepDone rank=2 iteration={self.done}")
        return [line for line in lines if "slow_node" in line or "swap" in line or "Assign" in line]


def test_it_is_reported_once_and_again_after_it_was_fast_for_long() -> None:
    job = Slowly()
    assert job.steps(STEPS + 5, 0.2) == []
    (line,) = job.steps(STEPS + 5, 0.6)
    assert "warning node=n1 kind=slow_node reason=n1 needs 0.6 s" in line
    assert job.steps(3, 0.2) + job.steps(STEPS + 1, 0.6) == []
    job.transcript.coordinator.job.vitals.slow["n1"] -= FORGET_S + 1  # that long ago
    assert job.steps(1, 0.2) == []
    assert len(job.steps(STEPS + 1, 0.6)) == 1


def test_where_asked_for_a_warm_spare_takes_its_seats_once_in_the_cool_down() -> None:
    job = Slowly("swap_slower_than=1.3")
    lines = job.steps(STEPS + 5, 0.3)
    assert [line.split()[2] for line in lines if line.startswith("log")] == ["warning", "swap_begun"]
    assert any(line.startswith("-> n3 Assign") for line in lines)
    machine = job.transcript.coordinator.job
    assert machine.members.members["n1"].slow
    machine.planned = None  # given up
    assert job.steps(STEPS, 0.3) == []
    machine.vitals.slow_swap_at = -COOL_DOWN_S
    assert any("swap_begun" in line for line in job.steps(1, 0.3))


def test_without_a_spare_it_stays_until_one_comes() -> None:
    job = Slowly("swap_slower_than=1.3", spares=0)
    (line,) = job.steps(STEPS + 5, 0.6)
    assert "it stays, because no healthy warm spare is there" in line
    job.transcript.run("n7 Hello")
    job.transcript.run("n7 NodeReady")
    assert any("swap_begun" in line for line in job.steps(1, 0.6))


def test_without_the_policy_nothing_is_swapped() -> None:
    assert not any("swap_begun" in line for line in Slowly().steps(3 * STEPS, 0.9))
