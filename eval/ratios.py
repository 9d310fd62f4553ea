"""Ratios of paired samples: the median over prompts with a bootstrap interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from specdec.eval.timing import Sample

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median of per-prompt ratios and its bootstrap interval over prompts."""

    median: float
    low: float
    high: float
    per_prompt: list[float]


def speedup(
    baseline: Sequence[Sample], variant: Sequence[Sample], time_of: Callable[[Sample], float], level: float = 0.95
) -> Ratio:
    """Return baseline time over variant time per token: each prompt's is the median over its repeats."""
    pairs: dict[int, list[float]] = {}
    for a, b in zip(baseline, variant, strict=True):
        assert (a.prompt, a.repeat) == (b.prompt, b.repeat), "samples are paired by prompt and repeat"
        pairs.setdefault(a.prompt, []).append((time_of(a) / a.num_tokens) / (time_of(b) / b.num_tokens))
    per_prompt = [statistics.median(values) for values in pairs.values()]
    low, high = bootstrap_interval(per_prompt, level)
    return Ratio(statistics.median(per_prompt), low, high, per_prompt)


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
