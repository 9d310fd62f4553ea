"""Ratios of paired times: the median over units, which are prompts or batches, with a bootstrap interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

Pair = tuple[int, float, float]  # unit, the baseline's seconds per token, the variant's


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median of ratios by unit and its bootstrap interval over units."""

    median: float
    low: float
    high: float
    level: float
    per_unit: dict[int, float]


def speedup(pairs: Iterable[Pair], level: float = 0.95) -> Ratio | None:
    """Return baseline time over variant time per token: each unit's is the median over its pairs, the repeats.

    None without pairs. Of one unit the interval has no width: it says nothing about others.
    """
    found: dict[int, list[float]] = {}
    for unit, baseline_s, variant_s in pairs:
        found.setdefault(unit, []).append(baseline_s / variant_s)
    if not found:
        return None
    per_unit = {unit: statistics.median(values) for unit, values in sorted(found.items())}
    low, high = bootstrap_interval(list(per_unit.values()), level)
    return Ratio(statistics.median(per_unit.values()), low, high, level, per_unit)


def bootstrap_interval(values: Sequence[float], level: float = 0.95, rounds: int = 2000) -> tuple[float, float]:
    """Return the percentile interval of the median under resampling; seeded, so a report can be made again."""
    return _interval(values, statistics.median, level, rounds)


def micro_interval(
    pairs: Sequence[tuple[float, float]], level: float = 0.95, rounds: int = 2000
) -> tuple[float, float]:
    """Return the percentile interval of a sum over a sum, such as tokens over steps, under resampling of the pairs."""
    return _interval(pairs, lambda drawn: sum(a for a, _ in drawn) / sum(b for _, b in drawn), level, rounds)


def _interval(
    values: Sequence[_T], statistic: Callable[[Sequence[_T]], float], level: float, rounds: int
) -> tuple[float, float]:
    source = random.Random(0)
    found = sorted(statistic(source.choices(values, k=len(values))) for _ in range(rounds))
    cut = int((1 - level) / 2 * rounds)
    return found[cut], found[rounds - 1 - cut]
