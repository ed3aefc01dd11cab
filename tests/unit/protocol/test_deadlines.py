"""Deadlines are checked against each other, and errors name the pair (F16)."""

from __future__ import annotations

import graphlib

import pytest

from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.deadlines import ORDERED, Deadlines
from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.messages import JobSpec
from deadpool_ext.protocol.timers import Timers
from deadpool_ext.protocol.types import UsageError


def test_defaults_are_consistent_and_survive_the_wire() -> None:
    assert Deadlines.from_options(Deadlines().to_options()) == Deadlines()
    assert Deadlines.from_options({"fence_s": 30}).fence_s == 30.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"heartbeat_s": 4.0},
            "heartbeat_s=4 and node_timeout_s=10: node_timeout_s must be at least 3 times heartbeat_s",
        ),
        ({"hang_s": 700.0}, "hang_s=700 and hang_max_s=600"),
        ({"slow_s": 60.0}, "slow_s=60 and hang_s=60"),
        ({"rebuild_s": 0.0}, "rebuild_s=0 must be a positive number of seconds"),
        ({"rebuild_s": float("nan")}, "rebuild_s=nan must be a positive number"),
        ({"hang_factor": 0.5}, "hang_factor=0.5 must be at least 1"),
        ({"fense_s": 3.0}, "unknown deadline 'fense_s'; known: "),
    ],
)
def test_contradictions_are_named(options: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Deadlines.from_options(options)
    assert words in str(caught.value)


@pytest.mark.parametrize(("shorter", "longer", "why"), ORDERED, ids=lambda text: text.replace(" ", "_")[:20])
def test_f16_every_pair_of_timeouts_that_contradict_each_other_is_refused_by_name(
    shorter: str, longer: str, why: str
) -> None:
    """All others are as they should be: this pair alone is the wrong way round."""
    after: dict[str, set[str]] = {name: set() for name in Deadlines().to_options()}
    for low, high, _ in ORDERED:
        if (low, high) != (shorter, longer):
            after[high].add(low)
    after[shorter].add(longer)
    options = {name: 4.0**place for place, name in enumerate(graphlib.TopologicalSorter(after).static_order())}
    with pytest.raises(UsageError) as caught:
        Deadlines.from_options(options)
    text = str(caught.value)
    assert f"{shorter}={options[shorter]:g} and {longer}={options[longer]:g}" in text
    assert text.endswith(why) and "\n" not in text


def test_config_is_checked() -> None:
    job = JobSpec(job_id="j", argv=(), cwd="/", env={}, layout=plain_layout(ranks_per_node=2, data_parallel=4))
    CoordinatorConfig(job=job, nodes=2)
    with pytest.raises(UsageError, match="3 nodes of 2 ranks make 6 ranks, but the layout has 4"):
        CoordinatorConfig(job=job, nodes=3)
    with pytest.raises(UsageError, match="at least one node"):
        CoordinatorConfig(job=job, nodes=0)
    with pytest.raises(UsageError, match="seat_domains names 1 of 4"):
        CoordinatorConfig(job=job, nodes=2, seat_domains=("a",))
    with pytest.raises(UsageError, match="must be positive"):
        CoordinatorConfig(job=job, nodes=2, fruitless_limit=0)


def test_timers_pass_in_order_and_can_be_moved() -> None:
    timers = Timers()
    timers.start("b", 2.0)
    timers.start("a:x", 1.0)
    timers.start("a:y", 3.0)
    assert timers.earliest == 1.0 and timers.at("b") == 2.0 and timers.running("b")
    assert timers.pop_due(0.5) is None
    assert [timers.pop_due(2.0), timers.pop_due(2.0), timers.pop_due(2.0)] == ["a:x", "b", None]
    timers.shift(10.0)
    assert timers.pop_due(12.9) is None and timers.at("a:y") == 13.0
    timers.start("c", 1.0)
    timers.cancel_kind("a")
    timers.cancel("nothing")
    timers.keep_only(("d",))
    assert timers.earliest is None
