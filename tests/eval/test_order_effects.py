"""What the place in a turn and the time in a run do is told, what cannot be told is not, and chance is no effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specdec.eval.order_effects import order_effects
from specdec.eval.ratios import speedup
from specdec.eval.schedule import Turn, turns

NOTED = 0.02  # as in point_view


def order_of(names: str, num_batches: int, repeats: int) -> list[Turn]:
    return list(turns(list(names), [[str(i)] for i in range(num_batches)], repeats))


def effects_of(order: Sequence[Turn], seconds: Sequence[float]) -> list[dict[str, Any]]:
    variants, batches, places = [t.variant for t in order], [t.batch for t in order], [t.place for t in order]
    return order_effects(variants, batches, places, [float(i) for i in range(len(order))], seconds)


def by(found: Sequence[dict[str, Any]], what: str) -> dict[int, dict[str, Any]]:
    return {entry["number"]: entry for entry in found if entry["by"] == what}


@pytest.mark.parametrize(
    ("names", "num_batches", "repeats"), [("nd", 8, 2), ("ncdt", 16, 3), ("ncd", 16, 3), ("ncd", 9, 1)]
)
def test_what_a_place_does_is_seen_and_does_not_bias(names: str, num_batches: int, repeats: int) -> None:
    order = order_of(names, num_batches, repeats)
    speed = {"n": 1.0, "c": 1.0, "d": 2.0, "t": 0.4}
    source = np.random.default_rng(0)
    noise = source.normal(0, 0.002, len(order))
    slow = {i: float(np.exp(source.normal(0, 0.3))) for i in range(num_batches)}
    seconds = [
        slow[t.batch] / speed[t.variant] * (1.1 if t.place == 0 else 1.0) * float(np.exp(e))
        for t, e in zip(order, noise, strict=True)
    ]
    places = by(effects_of(order, seconds), "place")
    others = [entry["relative_time"] for place, entry in places.items() if place]
    assert places[0]["relative_time"] / np.mean(others) == pytest.approx(1.1, abs=0.01)
    assert all(entry["error"] < 0.02 for entry in places.values())
    pairs = [
        (t.batch, 0, a, b)
        for t, a in zip(order, seconds, strict=True)
        if t.variant == "n"
        for u, b in zip(order, seconds, strict=True)
        if (u.variant, u.batch, u.repeat) == ("d", t.batch, t.repeat)
    ]
    result = speedup(pairs)
    assert result is not None
    assert np.exp(np.mean(np.log(list(result.per_unit.values())))) == pytest.approx(2.0, rel=0.035)


def test_drift_is_seen() -> None:
    order = order_of("nd", 30, 2)
    thirds = by(effects_of(order, [1.0 if i < 40 else 1.2 for i in range(len(order))]), "third")
    assert thirds[2]["relative_time"] / thirds[0]["relative_time"] == pytest.approx(1.2, abs=0.02)
    assert all(abs(entry["relative_time"] - 1) > max(NOTED, entry["error"]) for entry in thirds.values())


@pytest.mark.parametrize(("names", "num_batches"), [("nd", 12), ("ncdt", 12), ("nd", 10), ("ncdt", 7), ("ncdtxyz", 5)])
def test_drift_that_cannot_be_told_from_the_prompts_is_not_said_to_be_none(names: str, num_batches: int) -> None:
    order = order_of(names, num_batches, 1)
    found = effects_of(order, [1.0 + 0.02 * i for i in range(len(order))])
    assert not by(found, "third")
    assert len(by(found, "place")) == len(names)


def test_what_too_few_samples_say_is_not_told() -> None:
    for repeats in (1, 2):
        order = order_of("n", 1, repeats)
        assert effects_of(order, [1.0] * len(order)) == []
    assert effects_of(order_of("nd", 2, 1), [1.0, 2.0, 2.0, 1.0]) == []
    assert order_effects([], [], [], [], []) == []


@pytest.mark.parametrize(("names", "num_batches", "repeats"), [("ncdt", 6, 2), ("nd", 12, 3), ("ncd", 9, 1)])
def test_chance_is_rarely_called_an_effect(names: str, num_batches: int, repeats: int) -> None:
    order = order_of(names, num_batches, repeats)
    source = np.random.default_rng(2)
    rounds, alarms = 1000, 0
    for _ in range(rounds):
        found = effects_of(order, list(np.exp(source.normal(0, 0.2, len(order)))))
        assert found
        alarms += any(abs(np.log(entry["relative_time"])) > entry["error"] for entry in found)
    assert alarms / rounds < 0.05 + 3 * (0.05 * 0.95 / rounds) ** 0.5
    assert alarms / rounds > 0.01, "a test that never rings tells nothing"
