"""The coordinator among honest agents, under any interleaving of messages and failures, ends or progresses (INV-7)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from deadpool_ext.protocol.deadlines import Deadlines
from deadpool_ext.protocol.layout import plain_layout
from tests.property.simulated_node import Fault, make_config
from tests.property.simulation import Cluster

LAYOUTS = [
    (plain_layout(ranks_per_node=1, data_parallel=2), 2),
    (plain_layout(ranks_per_node=2, tensor_parallel=2, data_parallel=2), 2),
    (plain_layout(ranks_per_node=2, data_parallel=4, pipeline_parallel=1), 2),
    (plain_layout(ranks_per_node=2, tensor_parallel=2, data_parallel=2, pipeline_parallel=2), 4),
    (plain_layout(ranks_per_node=1, data_parallel=3), 3),
]
KINDS = ("kill", "kill", "silence", "exit", "hang", "collective", "join", "leave", "return", "spoil", "spoil_own")
PLANNED = ("swap", "swap", "drain")
ITERATIONS = 4
SOON = Deadlines(slow_s=5.0, hang_s=15.0, hang_max_s=20.0, hang_factor=1.0)


def check(cluster: Cluster, iterations: int = ITERATIONS) -> None:
    """What holds for every finished run."""
    assert cluster.exit is not None and cluster.final is not None
    assert cluster.exit.code in (0, 3, 4), cluster.exit
    if cluster.exit.code == 0:
        assert cluster.exit.reason == "training finished"
        assert {line["iteration"] for line in cluster.steps} == set(range(1, iterations + 1))
        assert all(seat["digests"] for seat in cluster.final["seats"])
    else:
        assert cluster.exit.reason
    lines = Counter((line["iteration"], line["generation"]) for line in cluster.steps)
    assert max(lines.values(), default=1) == 1, "an iteration is recorded once per generation"
    generations = [log.generation for log in cluster.logs if log.event == "generation_start"]
    assert generations == sorted(set(generations)), "each generation starts once"
    if not any(log.event == "corruption_detected" for log in cluster.logs):
        replayed = [log.fields["steps_replayed"] for log in cluster.logs if log.event == "recovery_done"]
        assert all(steps <= 1 for steps in replayed), "INV-6"
    for log in cluster.logs:
        if log.event == "recovery_done" and "planned" in log.fields and not log.fields["failures"]:
            assert log.fields["steps_replayed"] == 0, "a planned swap computes nothing again"
    for request, answers in cluster.answers.items():
        assert [answer.final for answer in answers].count(True) == 1 and answers[-1].final, (request, answers)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(LAYOUTS),
    spares=st.integers(0, 3),
    faults=st.lists(
        st.builds(Fault, kind=st.sampled_from(KINDS + PLANNED), after=st.integers(0, 60), victim=st.integers(0, 50)),
        min_size=1,
        max_size=6,
    ),
    settled=st.sampled_from([True, True, False]),
)
def test_every_run_ends(seed: int, layout: tuple, spares: int, faults: list[Fault], settled: bool) -> None:
    """``after`` of each fault counts from the one before; ``settled``: the first from the first committed version."""
    shape, nodes = layout
    cluster = Cluster(make_config(shape, nodes=nodes, spares=spares, deadlines=SOON), seed, [], ITERATIONS)
    while settled and cluster.coordinator.state != "running":
        cluster.act()
    at = cluster.actions
    for fault in faults:
        at += fault.after * shape.world_size // 2
        cluster.faults.append(replace(fault, after=at))
    cluster.run(limit=60_000)
    check(cluster)
    assert cluster.exit is not None
    event(f"exit {cluster.exit.code}, recoveries {cluster.coordinator.job.recoveries}")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(LAYOUTS),
    victim=st.integers(0, 50),
    later=st.integers(0, 25),
)
def test_one_loss_with_a_spare_is_survived(seed: int, layout: tuple, victim: int, later: int) -> None:
    shape, nodes = layout
    cluster = Cluster(make_config(shape, nodes=nodes, spares=1, deadlines=SOON), seed, [], ITERATIONS)
    while cluster.coordinator.state != "running":
        cluster.act()
    cluster.faults = [Fault(kind="kill", after=cluster.actions + later * shape.world_size // 2, victim=victim)]
    cluster.run(limit=60_000)
    check(cluster)
    done = [log for log in cluster.logs if log.event == "recovery_done"]
    assert cluster.exit is not None
    assert cluster.exit.code == 0, cluster.exit
    for log in done:
        assert log.fields["steps_replayed"] in (0, 1), "INV-6"
        seconds = dict(log.fields["seconds"])
        total = seconds.pop("total")
        assert abs(sum(seconds.values()) - total) < 1e-3
    event(f"exit {cluster.exit.code}, recoveries {len(done)}")


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(LAYOUTS),
    spares=st.integers(1, 2),
    asked=st.lists(
        st.builds(Fault, kind=st.sampled_from(PLANNED), after=st.integers(0, 120), victim=st.integers(0, 50)),
        min_size=1,
        max_size=4,
    ),
)
def test_planned_swaps_compute_nothing_again(seed: int, layout: tuple, spares: int, asked: list[Fault]) -> None:
    """Whatever is asked for, and when: every iteration is computed once, nobody fails, and every answer comes."""
    shape, nodes = layout
    iterations = 12
    cluster = Cluster(make_config(shape, nodes=nodes, spares=spares, deadlines=SOON), seed, [], iterations)
    while cluster.coordinator.state != "running":
        cluster.act()
    at = cluster.actions
    for fault in asked:
        at += fault.after * shape.world_size // 2
        cluster.faults.append(replace(fault, after=at))
    cluster.run(limit=120_000)
    check(cluster, iterations)
    assert cluster.exit is not None
    assert cluster.exit.code == 0, cluster.exit
    assert not any(log.event == "failure_detected" for log in cluster.logs)
    assert [line["iteration"] for line in cluster.steps] == sorted({line["iteration"] for line in cluster.steps})
    event(f"swaps {cluster.coordinator.job.swaps}")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(LAYOUTS),
    victim=st.integers(0, 50),
    later=st.integers(0, 25),
)
def test_one_hang_is_ended_by_a_restart_of_that_worker_alone(seed: int, layout: tuple, victim: int, later: int) -> None:
    shape, nodes = layout
    cluster = Cluster(make_config(shape, nodes=nodes, spares=1, deadlines=SOON), seed, [], ITERATIONS)
    while cluster.coordinator.state != "running":
        cluster.act()
    cluster.faults = [Fault(kind="hang", after=cluster.actions + later * shape.world_size // 2, victim=victim)]
    while cluster.faults and cluster.exit is None:
        cluster.act()
    hung = [
        (node.name, rank) for node in cluster.nodes.values() for rank, worker in node.workers.items() if worker.hung
    ]
    cluster.run(limit=60_000)
    check(cluster)
    assert cluster.exit is not None
    assert cluster.exit.code == 0, cluster.exit
    failures = [log for log in cluster.logs if log.event == "failure_detected"]
    assert [(log.node, log.rank, log.fields["kind"]) for log in failures] == [(*who, "hang") for who in hung]
    assert all(node in cluster.coordinator.job.members.members for node, _ in hung), "no spare is used"
    event(f"hangs {len(hung)}")
