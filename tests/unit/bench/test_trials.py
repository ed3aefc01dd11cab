"""What a campaign draws."""

from __future__ import annotations

from collections import Counter

import pytest

from deadpool_ext.bench.trials import EXPECTED, FIRST_STEP, STEPS_APART, Shape, draw
from deadpool_ext.protocol.fault_kinds import AVAILABLE
from deadpool_ext.protocol.faults import parse_fault
from deadpool_ext.protocol.types import UsageError

NAMES = [f"n{index}" for index in range(12)]


def test_the_same_seed_draws_the_same_faults() -> None:
    shape = Shape(nodes=4, ranks_per_node=2, per_run=3)
    assert draw(shape, 5, 20) == draw(shape, 5, 20)
    assert draw(shape, 5, 20) != draw(shape, 6, 20)


def test_every_kind_comes_and_every_spec_is_understood() -> None:
    shape = Shape(nodes=4, ranks_per_node=2, per_run=4)
    trials = draw(shape, 1, 2 * len(EXPECTED))
    faults = [parse_fault(spec, node_names=NAMES) for trial in trials for spec in trial.faults]
    assert Counter(fault.kind for fault in faults) == Counter({kind: 2 for kind in EXPECTED})


def test_faults_of_a_run_do_not_meet() -> None:
    for trial in draw(Shape(nodes=4, ranks_per_node=2, per_run=4), 2, 40):
        steps = [parse_fault(spec, node_names=NAMES).step for spec in trial.faults]
        assert steps == [FIRST_STEP + STEPS_APART * index for index in range(len(steps))]
        assert trial.iterations > (steps[-1] or 0)


def test_every_kind_has_an_expectation() -> None:
    # Live tensors that flip are found only by --deadpool-check-params-every, which a campaign does without.
    assert set(EXPECTED) >= set(AVAILABLE) - {"corrupt-param", "corrupt-main"}


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="--kinds kill-everything"):
        Shape(nodes=4, ranks_per_node=2, kinds=("kill-everything",))
