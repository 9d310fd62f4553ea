"""Intervals over units, which are prompts or batches: of medians of paired times' ratios, and of sums over sums."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np

from specdec.eval.student import t_quantile

_ALIKE = 1e-12  # relative: ratios that differ by rounding only
_HALVINGS = 50  # of an interval that a share lies in

Pair = tuple[int, int, float, float]  # unit, which part of it, the baseline's seconds per token, the variant's
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median of ratios by unit and its interval over units, which few units do not have."""

    median: float
    low: float | None
    high: float | None
    level: float
    per_unit: dict[int, float]


def speedup(pairs: Iterable[Pair], level: float = 0.95) -> Ratio | None:
    """Return baseline time over variant time per token, the median over units; None without pairs.

    A unit's is the median over its parts, such as the turns of a conversation, and a part's that over its pairs, the
    repeats: a turn that was repeated more often, in a run that was stopped, says no more than the others.
    """
    by_part: dict[tuple[int, int], list[float]] = {}
    for unit, part, baseline_s, variant_s in pairs:
        by_part.setdefault((unit, part), []).append(baseline_s / variant_s)
    if not by_part:
        return None
    by_unit: dict[int, list[float]] = {}
    for (unit, _), ratios in sorted(by_part.items()):
        by_unit.setdefault(unit, []).append(statistics.median(ratios))
    per_unit = {unit: statistics.median(ratios) for unit, ratios in by_unit.items()}
    low, high = median_interval(list(per_unit.values()), level) or (None, None)
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


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Return an interval that holds the median of what the values are drawn from; None of too few values.

    A percentile bootstrap interval of a median ends at values, or halfway between two. At which is calibrated here, so
    that it holds at least `level` of the time for any distribution and any number of values. For a median that is known
    without drawing: it is the interval of the sign test.

    Source: Thompson 1936, "On confidence ranges for the median"; Loh 1987, "Calibrating confidence coefficients".
    """
    if len(values) < num_needed(level):
        return None
    ordered, cut = sorted(values), _num_cut(len(values), level)
    return ordered[cut], ordered[-1 - cut]


@cache
def _num_cut(count: int, level: float) -> int:
    """Return how many values may be left out at each end: as many or fewer are below the median 1 - level of the time.

    Both ends together.
    """
    ways, outside, cut = 1, 1, 0  # of 2^count: those with exactly, and with at most, `cut` values below
    while True:
        ways = ways * (count - cut) // (cut + 1)
        outside += ways
        if 2 * outside / 2**count > 1 - level:
            return cut
        cut += 1


def pairs_needed(level: float) -> int:
    """Return how many pairs an interval of a sum over a sum needs: from there on it was found to hold as it says.

    8 for 95 %, 10 for 99 %. By simulation: docs/metrics.md.
    """
    return num_needed(level) + 2


def micro_interval(
    pairs: Sequence[tuple[float, float]], level: float = 0.95, least: int = 0, rounds: int = 2000
) -> Interval | None:
    """Return the bootstrap interval of a sum over a sum, such as tokens over steps, over the pairs that are summed.

    Pairs are resampled, and the distance from the sample's ratio is taken in standard errors of the resampled one
    (studentised bootstrap), which does not come out narrow where few values, or skewed ones, are resampled. The
    percentiles are those at which the normal distribution is where Student's is at `level`. The ends are no less than
    the least of the pairs' own ratios and no more than the greatest; where all of those are equal it is a point.
    Seeded, so that a report can be made again.

    Source: Efron and Tibshirani 1993, section 12.5 (bootstrap-t); Hesterberg 2015, arXiv 1411.5279 (percentiles that
    are further out for few values).

    Args:
        pairs: above and below; the latter above 0.
        level: of the interval.
        least: fewer pairs have none, nor do fewer than `pairs_needed`.
        rounds: of resampling.
    """
    count = len(pairs)
    if count < max(least, pairs_needed(level)):
        return None
    above, below = np.asarray(pairs, dtype=np.float64).T
    ratio = float(above.sum() / below.sum())
    rest = above - ratio * below
    if np.abs(rest).max() <= _ALIKE * np.abs(above).max():
        return ratio, ratio
    sums = _times_drawn(count, rounds) @ np.stack([rest, below, rest**2, rest * below, below**2], axis=1)
    distances = sums[:, 0] / sums[:, 1]
    squares = sums[:, 2] - 2 * distances * sums[:, 3] + distances**2 * sums[:, 4]
    with np.errstate(divide="ignore", invalid="ignore"):  # all that were drawn have one ratio
        away = np.sort(np.nan_to_num(distances * sums[:, 1] / np.sqrt(squares.clip(0))))
    cut = int(NormalDist().cdf(-t_quantile(level, count - 1)) * rounds)
    error = float((rest**2).sum() ** 0.5 / below.sum())
    low, high = np.clip([ratio - away[rounds - 1 - cut] * error, ratio - away[cut] * error], *_ends(above / below))
    return float(low), float(high)


def _ends(values: np.ndarray) -> Interval:
    return float(values.min()), float(values.max())


@lru_cache(maxsize=8)
def _times_drawn(count: int, rounds: int) -> np.ndarray:
    """Return [rounds, count] how often each of `count` values is drawn when as many are, with replacement."""
    return np.random.default_rng(0).multinomial(count, [1 / count] * count, rounds).astype(np.float64)


def share_interval(count: int, total: int, level: float = 0.95) -> Interval | None:
    """Return the exact interval of the share that `count` of `total` independent cases are; None of no case.

    Resampling cannot do that: where all cases are alike it finds no other.

    Source: Clopper and Pearson 1934.
    """
    if total == 0:
        return None
    return _least_share(count, total, level), 1 - _least_share(total - count, total, level)


def _least_share(count: int, total: int, level: float) -> float:
    """Return the share under which `count` or more of `total` come (1 - level) / 2 of the time."""
    if count == 0:
        return 0.0
    ways = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(count, total + 1)]
    logs, hits = np.array(ways), np.arange(count, total + 1)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        chance = np.exp(logs + hits * math.log(share) + (total - hits) * math.log1p(-share)).sum()
        low, high = (share, high) if chance < (1 - level) / 2 else (low, share)
    return low
