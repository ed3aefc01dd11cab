"""Medians, spreads and ratios of benchmarks, and the files they are written to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deadpool_ext.bench.results import Bars, Results, Table
from deadpool_ext.bench.statistic import Interval, Spread, bootstrap, paired_ratio, quantile, verdict
from deadpool_ext.protocol.types import UsageError


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.25, 1.75)])
def test_quantiles_are_interpolated_between_neighbours(share: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(expected)


def test_a_spread_tells_tail_and_middle() -> None:
    spread = Spread.of([float(number) for number in range(101)])
    assert (spread.count, spread.least, spread.median, spread.p90, spread.p99, spread.most) == (101, 0, 50, 90, 99, 100)


def test_nothing_is_told_of_no_values() -> None:
    with pytest.raises(UsageError):
        Spread.of([])
    with pytest.raises(UsageError, match="at least 3"):
        bootstrap([1.0, 2.0], seed=1)
    with pytest.raises(UsageError, match="positive"):
        paired_ratio([(1.0, 0.0)] * 3, seed=1)


def test_a_ratio_of_pairs_is_not_moved_by_what_changes_for_both() -> None:
    """The machine gets twice as slow on the way; the second of each pair takes 2 % longer."""
    pairs = [(slow, slow * 1.02) for slow in (1.0, 1.1, 1.3, 1.6, 2.0)]
    ratio = paired_ratio(pairs, seed=7)
    assert ratio.estimate == pytest.approx(1.02)
    assert ratio.half_width < 1e-9
    assert paired_ratio(pairs, seed=7) == ratio


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.998, 1.004, "within"),
        (0.98, 1.009, "inconclusive"),  # too wide to tell
        (1.004, 1.013, "inconclusive"),
        (1.011, 1.015, "above"),
    ],
)
def test_a_claim_needs_the_upper_bound_and_a_narrow_interval(low: float, high: float, expected: str) -> None:
    assert verdict(Interval(estimate=(low + high) / 2, low=low, high=high), 1.01, 0.005) == expected


def test_results_are_json_table_and_picture(tmp_path: Path) -> None:
    table = Table(title="copying", columns=("what", "GB/s"), rows=(("memcpy", "10.0"),))
    bars = Bars(title="copying", unit="GB/s", labels=("memcpy",), values=(10.0,), spreads=((9.0, 11.0),))
    results = Results(name="copy", data={"rows": [1]}, tables=[table], bars=[bars], notes=["One line."])
    written = results.write(tmp_path / "out")
    assert [path.name for path in written] == ["copy.json", "copy.md", "copy.png"]
    content = json.loads(written[0].read_text())
    assert content["rows"] == [1] and content["surroundings"]["cores"] >= 1
    assert "| memcpy | 10.0 |" in written[1].read_text()
    assert written[2].read_bytes().startswith(b"\x89PNG")
