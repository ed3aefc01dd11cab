"""What repeated measurements add up to: medians, their spread, and ratios of runs taken side by side."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deadpool_ext.protocol.types import UsageError

RESAMPLES: Final = 4000
CONFIDENCE: Final = 0.95


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie, interpolated linearly between neighbours (the definition numpy
    calls ``linear``). Raises UsageError without values or for a share outside 0..1."""
    if not values or not 0.0 <= share <= 1.0:
        raise UsageError(f"no quantile {share:g} of {len(values)} values")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Repetitions of one measurement, in the unit of the values."""

    count: int
    least: float
    median: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises UsageError without values."""
        return cls(
            count=len(values),
            least=quantile(values, 0.0),
            median=quantile(values, 0.5),
            p90=quantile(values, 0.9),
            p99=quantile(values, 0.99),
            most=quantile(values, 1.0),
        )

    def to_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its confidence interval (95 %)."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


def bootstrap(
    samples: Sequence[float], seed: int, statistic: Callable[[Sequence[float]], float] = statistics.median
) -> Interval:
    """Percentile bootstrap of ``statistic`` (Efron 1979): deterministic for a seed. Raises UsageError for fewer than 3
    samples, of which no interval can be told."""
    if len(samples) < 3:
        raise UsageError(f"{len(samples)} repetitions have no confidence interval; take at least 3")
    chance = random.Random(seed)
    found = [statistic(chance.choices(samples, k=len(samples))) for _ in range(RESAMPLES)]
    tail = (1.0 - CONFIDENCE) / 2
    return Interval(estimate=statistic(samples), low=quantile(found, tail), high=quantile(found, 1.0 - tail))


def paired_ratio(pairs: Sequence[tuple[float, float]], seed: int) -> Interval:
    """How much longer the second of each pair takes than the first, as a ratio.

    Each pair was measured side by side, so that what changes slowly on a machine is in both. The estimate is the median
    of the pairs' ratios; pairs, not single values, are resampled. Raises UsageError for non-positive values or fewer
    than 3 pairs.
    """
    if any(first <= 0.0 or second <= 0.0 for first, second in pairs):
        raise UsageError("a ratio needs positive values")
    return bootstrap([second / first for first, second in pairs], seed)


def verdict(ratio: Interval, limit: float, half_width: float) -> str:
    """``within`` if the upper bound is at most ``limit`` and the interval at most ``half_width`` to each side;
    ``above`` if even the lower bound is over ``limit``; else ``inconclusive``."""
    if ratio.low > limit:
        return "above"
    return "within" if ratio.high <= limit and ratio.half_width <= half_width else "inconclusive"
