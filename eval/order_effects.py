"""What the place in a turn, or the time in a run, does to a sample's time: noise made visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_ROUNDS = 20  # of fitting one factor after the other; far more than balanced designs need
_THIRDS = 3


def order_effects(
    variants: Sequence[str],
    batches: Sequence[int],
    places: Sequence[int],
    starts_s: Sequence[float],
    seconds: Sequence[float],
) -> list[dict[str, Any]]:
    """Return how many times longer runs at each place of a turn, and in each third of the run, took than all.

    The logarithm of a time is taken as the sum of what its variant, its batch and the place give; that of the place is
    fitted together with the others, so that neither which variants nor which prompts ran there is in it. Beside each
    stands twice its standard error.

    Args:
        variants: of each sample.
        batches: likewise.
        places: likewise.
        starts_s: likewise, when it began.
        seconds: likewise, per token; above 0.
    """
    if not seconds:
        return []
    last = max(starts_s)
    thirds = [min(_THIRDS - 1, int(_THIRDS * start / last)) if last else 0 for start in starts_s]
    found = []
    for by, labels in (("place", list(places)), ("third", thirds)):
        if len(set(labels)) < 2:
            continue
        factors = [_codes(list(variants)), _codes(list(batches)), _codes(labels)]
        effects, rest = _fit(np.log(np.asarray(seconds, dtype=np.float64)), factors)
        for number in sorted(set(labels)):
            mine = factors[-1] == sorted(set(labels)).index(number)
            count = int(mine.sum())
            error = 2 * float(rest.std() / count**0.5)
            effect = float(effects[mine][0])
            found.append(
                {
                    "by": by,
                    "number": number,
                    "relative_time": float(np.exp(effect)),
                    "error": error,
                    "num_samples": count,
                }
            )
    return found


def _codes(labels: Sequence[Any]) -> np.ndarray:
    names = {label: i for i, label in enumerate(sorted(set(labels)))}
    return np.array([names[label] for label in labels])


def _fit(values: np.ndarray, factors: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return, per sample, what the last factor gives, and what no factor explains.

    Source: backfitting of an additive model, Breiman and Friedman 1985.
    """
    parts = [np.zeros_like(values) for _ in factors]
    middle = values.mean()
    for _ in range(_ROUNDS):
        for i, codes in enumerate(factors):
            left = values - middle - sum(part for j, part in enumerate(parts) if j != i)
            means = np.bincount(codes, weights=left) / np.bincount(codes)
            parts[i] = (means - np.average(means, weights=np.bincount(codes)))[codes]
    return parts[-1], values - middle - sum(parts)
