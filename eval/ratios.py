"""Ratios of paired times: the median over units, which are prompts or batches, with a bootstrap interval."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Pair = tuple[int, float, float]  # unit, the baseline's seconds per token, the variant's
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median of ratios by unit and its bootstrap interval over units, which few units do not have."""

    median: float
    low: float | None
    high: float | None
    level: float
    per_unit: dict[int, float]


def speedup(pairs: Iterable[Pair], level: float = 0.95) -> Ratio | None:
    """Return baseline time over variant time per token: each unit's is the median over its pairs, the repeats.

    None without pairs.
    """
    found: dict[int, list[float]] = {}
    for unit, baseline_s, variant_s in pairs:
        found.setdefault(unit, []).append(baseline_s / variant_s)
    if not found:
        return None
    per_unit = {unit: statistics.median(values) for unit, values in sorted(found.items())}
    low, high = bootstrap_interval(list(per_unit.values()), level) or (None, None)
    return Ratio(statistics.median(per_unit.values()), low, high, level, per_unit)


def num_needed(level: float) -> int:
    """Return how many units an interval of the median needs: fewer do not span it that surely, whatever is drawn.

    The median of a distribution lies outside of n independent values with probability 2^(1 - n): all are above it, or
    all below. 6 for 95 %, 8 for 99 %.
    """
    count = 2
    while 1 - 2.0 ** (1 - count) < level:
        count += 1
    return count


def bootstrap_interval(values: Sequence[float], level: float = 0.95, rounds: int = 2000) -> Interval | None:
    """Return the percentile interval of the median under resampling; None of too few values.

    Seeded, so that a report can be made again.
    """
    if len(values) < num_needed(level):
        return None
    drawn = np.asarray(values, dtype=np.float64)[_resampled(len(values), rounds)]
    return _percentiles(np.median(drawn, axis=1), level)


def micro_interval(pairs: Sequence[tuple[float, float]], level: float = 0.95, rounds: int = 2000) -> Interval | None:
    """Return the percentile interval of a sum over a sum, such as tokens over steps, under resampling of the pairs.

    None of too few pairs: see `num_needed`.
    """
    if len(pairs) < num_needed(level):
        return None
    drawn = np.asarray(pairs, dtype=np.float64)[_resampled(len(pairs), rounds)].sum(axis=1)
    return _percentiles(drawn[:, 0] / drawn[:, 1], level)


def _resampled(count: int, rounds: int) -> np.ndarray:
    """Return [rounds, count] indices, drawn with replacement."""
    return np.random.default_rng(0).integers(0, count, (rounds, count))


def _percentiles(found: np.ndarray, level: float) -> Interval:
    ordered = np.sort(found)
    cut = int((1 - level) / 2 * len(ordered))
    return float(ordered[cut]), float(ordered[len(ordered) - 1 - cut])
