"""Speedups are medians of medians, and intervals hold as often as they say, however few or skewed the values are."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest

from specdec.eval.ratios import median_interval, micro_interval, num_needed, pairs_needed, share_interval, speedup
from specdec.eval.student import t_quantile

Draw = Callable[[np.random.Generator, int], np.ndarray]

MEDIANS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda source, n: source.normal(1.0, 0.1, n), 1.0),
    "lognormal": (lambda source, n: np.exp(source.normal(0, 1, n)), 1.0),
    "ratio": (lambda source, n: source.gamma(2, 1, n) / source.gamma(2, 1, n), 1.0),
}

SUMS: dict[str, tuple[Draw, float]] = {  # [n, 2] above and below, and the ratio of their means
    "normal": (lambda source, n: np.stack([source.normal(3, 0.5, n), np.ones(n)], -1), 3.0),
    "lognormal": (lambda source, n: np.stack([np.exp(source.normal(0, 0.5, n)), np.ones(n)], -1), math.exp(0.125)),
    "tokens over steps": (lambda source, n: _tokens_over_steps(source, n), 2.6),
}


def _tokens_over_steps(source: np.random.Generator, n: int) -> np.ndarray:
    """Return answers of very different lengths with skewed acceptance lengths."""
    steps = np.ceil(np.exp(source.normal(3, 0.5, n)))
    return np.stack([steps * (1 + source.gamma(2, 0.8, n)), steps], -1)


def test_students_quantiles_are_those_of_the_tables() -> None:
    tabled = {(0.95, 1): 12.706, (0.95, 5): 2.571, (0.99, 7): 3.499, (0.99, 40): 2.704, (0.95, 1000): 1.962}
    for (level, num_free), expected in tabled.items():
        assert t_quantile(level, num_free) == pytest.approx(expected, abs=6e-4)
    assert t_quantile(0.95, 100_000) == pytest.approx(1.95998, abs=1e-3)


@pytest.mark.parametrize("level", [0.95, 0.99])
def test_a_medians_interval_is_the_narrowest_that_surely_holds(level: float) -> None:
    for count in range(num_needed(level), 60):
        found = median_interval(list(map(float, range(count))), level)
        assert found is not None
        cut = int(found[0])
        assert found == (cut, count - 1 - cut)
        below = list(accumulate(math.comb(count, k) for k in range(count + 1)))  # of 2 ** count
        assert 1 - 2 * below[cut] / 2**count >= level > 1 - 2 * below[cut + 1] / 2**count
    assert median_interval([1.0] * (num_needed(level) - 1), level) is None


@pytest.mark.parametrize("kind", MEDIANS)
@pytest.mark.parametrize(("count", "level"), [(6, 0.95), (7, 0.95), (24, 0.95), (8, 0.99), (24, 0.99)])
def test_intervals_of_medians_cover_what_they_say(kind: str, count: int, level: float) -> None:
    source, (draw, median) = np.random.default_rng(1), MEDIANS[kind]
    rounds, held = 4000, 0
    for _ in range(rounds):
        found = median_interval(list(draw(source, count)), level)
        assert found is not None
        held += found[0] <= median <= found[1]
    assert held / rounds > level - 3 * (level * (1 - level) / rounds) ** 0.5


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize(("count", "level"), [(8, 0.95), (24, 0.95), (10, 0.99), (24, 0.99)])
def test_intervals_of_sums_over_sums_cover_what_they_say(kind: str, count: int, level: float) -> None:
    source, (draw, ratio) = np.random.default_rng(1), SUMS[kind]
    rounds, held = 2000, 0
    for _ in range(rounds):
        found = micro_interval([(float(a), float(b)) for a, b in draw(source, count)], level)
        assert found is not None
        held += found[0] <= ratio <= found[1]
    assert held / rounds > level - 3 * (level * (1 - level) / rounds) ** 0.5


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_intervals_of_shares_cover_what_they_say(share: float) -> None:
    for total in (1, 6, 20, 300):
        chances = [math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(total + 1)]
        intervals = [share_interval(k, total) for k in range(total + 1)]
        held = sum(c for c, found in zip(chances, intervals, strict=True) if found and found[0] <= share <= found[1])
        assert held >= 0.95
    assert share_interval(0, 0) is None
    assert share_interval(20, 20) == (pytest.approx(0.025 ** (1 / 20)), 1.0)
    assert share_interval(3, 10) == (pytest.approx(0.0667, abs=1e-4), pytest.approx(0.6525, abs=1e-4))  # of the tables


def test_few_units_have_no_interval() -> None:
    assert (num_needed(0.95), num_needed(0.99)) == (6, 8)
    assert (pairs_needed(0.95), pairs_needed(0.99)) == (8, 10)
    assert micro_interval([(float(i), 1.0) for i in range(9)], 0.99) is None
    assert micro_interval([(float(i), 1.0) for i in range(9)], least=10) is None
    result = speedup([(i, 0, 2.0, 1.0) for i in range(5)])
    assert result is not None
    assert (result.median, result.low) == (2.0, None)


def test_turns_come_before_conversations_and_repeats_before_turns() -> None:
    ratios = {(0, 0): [8.0, 9.0, 9.0], (0, 1): [3.0], (0, 2): [1.0], (1, 0): [4.0]}
    result = speedup([(unit, turn, ratio, 1.0) for (unit, turn), own in ratios.items() for ratio in own])
    assert result is not None
    assert result.per_unit == {0: 3.0, 1: 4.0}  # the median of 9, 3 and 1; that of all five pairs is 8
    assert result.median == 3.5
