"""The joint choice is the best there is, by trying all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from specdec.draft_length.choice import LEAST_GAIN, Costs, best_rate, choose, seconds


def random_costs(dice: random.Random, rows: int, most: int) -> Costs:
    step_s = list(itertools.accumulate(dice.choice([0.0, 0.1, 0.5]) for _ in range(rows + most)))
    fixed, each, batched = dice.choice([0.0, 0.3]), dice.choice([0.0, 0.01, 0.4]), dice.choice([1.0, 1.5])
    return Costs([1.0 + s for s in step_s], lambda n: (fixed, each * batched ** (n - 1)), rows - 1, rows - 1)


def expected(gains: list[list[float]], counts: tuple[int, ...], costs: Costs) -> float:
    return costs.tokens + sum(sum(g[:n]) for g, n in zip(gains, counts, strict=True))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("rate", [None, 0.7])
def test_no_choice_is_better(seed: int, requests: int, rate: float | None) -> None:
    dice = random.Random(seed)
    gains = [[dice.random() * 0.9**d for d in range(1, 5)] for _ in range(requests)]
    gains = [sorted(g, reverse=True) for g in gains]
    costs = random_costs(dice, requests + 1, 4 * requests)

    def value(counts: tuple[int, ...]) -> float:
        spent = seconds(counts, costs)
        return expected(gains, counts, costs) / spent if rate is None else expected(gains, counts, costs) - rate * spent

    none = (0,) * requests
    every = list(itertools.product(range(5), repeat=requests))
    best = max(every, key=value)
    chosen = tuple(choose(gains, costs, rate=rate))
    least = LEAST_GAIN * value(none) if rate is None else value(none) + (LEAST_GAIN - 1) * costs.tokens
    if value(best) > least * (1 + 1e-9):
        assert value(chosen) == pytest.approx(value(best))
    else:
        assert chosen == none


def test_the_likeliest_tokens_come_first() -> None:
    # Rows are free up to three more, then dear: the three best of six are taken.
    costs = Costs([1.0] * 6 + [9.0] * 6, lambda n: (0.0, 0.0), 2, 2)
    assert choose([[0.9, 0.8, 0.7], [0.85, 0.2, 0.1]], costs) == [2, 1]


def test_dear_drafting_is_shared_or_left() -> None:
    """One round of drafting costs the same for one request and for four."""
    costs = Costs([1.0] * 30, lambda n: (0.0, 0.5), 4, 4)
    good = [0.9, 0.81]
    assert choose([good] * 4, costs) == [2] * 4
    assert choose([good, *[[0.0, 0.0]] * 3], costs) == [0] * 4


def test_units_of_several_rows() -> None:
    costs = Costs([1.0] * 5 + [1.2] * 4 + [9.0] * 12, lambda n: (0.0, 0.0), 1, 1)
    assert choose([[2.0]], costs, width=7) == [1]
    assert choose([[2.0]], costs, width=8) == [0]


def test_nothing_to_choose_from() -> None:
    costs = Costs([1.0] * 5, lambda n: (0.0, 0.0), 1, 1)
    assert choose([], costs) == []
    assert choose([[]], costs) == [0]
    assert choose([[0.0]], costs) == [0]


def test_rate_of_the_best_choice() -> None:
    costs = Costs([1.0, 1.0, 1.25], lambda n: (0.0, 0.25), 1, 1)
    assert best_rate([[0.8]], costs) == pytest.approx(1.8 / 1.5)
    assert best_rate([[0.2]], costs) == pytest.approx(1.0)
