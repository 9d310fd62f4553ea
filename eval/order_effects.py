"""What the place in a turn, or the time in a run, does to a sample's time: noise made visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.eval.student import t_quantile

_THIRDS = 3
_LEVEL = 0.95  # how often, where nothing has an effect, none is found: of all that are shown together
_LEAST_FREE = 4  # degrees of freedom of the scatter
_LEAST_OWN = 0.2  # share of a factor's differences that do not go with what it is fitted beside

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Fit:
    """A factor's effects on the logarithm of the time, by its labels, against the mean over samples."""

    effects: Floats
    errors: Floats  # standard errors
    num_free: int


def order_effects(
    variants: Sequence[str],
    batches: Sequence[int],
    places: Sequence[int],
    starts_s: Sequence[float],
    seconds: Sequence[float],
) -> list[dict[str, Any]]:
    """Return how many times longer runs at each place of a turn, and in each third of the run, took than all.

    The logarithm of a time is taken as the sum of what its variant, its batch, its place and the third of the run
    give. They are fitted together, so that neither which variants nor which prompts ran there is in it. A factor that
    cannot be told from what it is fitted beside is left out, such as the third of a run in which each batch ran once.
    `error` is how far from 1 a relative time may be by chance: where nothing has an effect all are within theirs, 95
    times in 100.

    Args:
        variants: of each sample.
        batches: likewise.
        places: likewise.
        starts_s: likewise, when it began.
        seconds: likewise, per token; above 0.

    Source: least squares with Student's t; the level is shared by the tests (Bonferroni).
    """
    if not seconds:
        return []
    last, times = max(starts_s), np.log(np.asarray(seconds, dtype=np.float64))
    thirds = [min(_THIRDS - 1, int(_THIRDS * start / last)) if last else 0 for start in starts_s]
    factors = {"place": list(places), "third": thirds}
    fits = {
        "place": _fit(times, batches, [variants], places),
        "third": _fit(times, batches, [variants, places], thirds),
    }
    num_tests = sum(len(fit.effects) for fit in fits.values() if fit is not None)
    found = []
    for by, fit in fits.items():
        if fit is None:
            continue
        wide = t_quantile(1 - (1 - _LEVEL) / num_tests, fit.num_free)
        for label, effect, error in zip(sorted(set(factors[by])), fit.effects, fit.errors, strict=True):
            found.append(
                {
                    "by": by,
                    "number": label,
                    "relative_time": float(np.exp(effect)),
                    "error": wide * float(error),
                    "num_samples": factors[by].count(label),
                }
            )
    return found


def _fit(values: Floats, batches: Sequence[int], beside: Sequence[Sequence[Any]], labels: Sequence[int]) -> _Fit | None:
    """Return what the labels give, beside batches and other factors; None if that cannot be told from what those give.

    Batches are many: they are not fitted but taken out of everything else first, and the other factors then likewise.

    Source: Frisch and Waugh 1933.
    """
    own, of_batch = _columns(labels), _columns(batches)
    counts = of_batch.sum(axis=0)

    def within(columns: Floats) -> Floats:
        return columns - of_batch @ ((of_batch.T @ columns) / counts[:, None])

    directions, sizes, _ = np.linalg.svd(within(np.hstack([*map(_columns, beside)])), full_matrices=False)
    directions = directions[:, sizes > 1e-9 * len(values) ** 0.5]
    mine, left = within(own[:, 1:]), within(values[:, None])  # the first label's effect is 0
    mine, left = (part - directions @ (directions.T @ part) for part in (mine, left))
    num_free = len(values) - len(counts) - directions.shape[1] - mine.shape[1]
    if not mine.shape[1] or num_free < _LEAST_FREE:
        return None
    whole = own[:, 1:] - own[:, 1:].mean(axis=0)
    if np.linalg.eigvals(np.linalg.solve(whole.T @ whole, mine.T @ mine)).real.min() < _LEAST_OWN:
        return None
    inverse = np.linalg.inv(mine.T @ mine)
    effects = inverse @ mine.T @ left
    variance = float(((left - mine @ effects) ** 2).sum()) / num_free
    against_mean = np.eye(own.shape[1])[:, 1:] - own[:, 1:].mean(axis=0)
    errors = np.sqrt(np.diag(against_mean @ inverse @ against_mean.T) * variance)
    return _Fit((against_mean @ effects)[:, 0], errors, num_free)


def _columns(labels: Sequence[Any]) -> Floats:
    """Return [n, k] 1.0 where a sample has the label, labels in their order."""
    names = {label: i for i, label in enumerate(sorted(set(labels)))}
    return np.eye(len(names))[[names[label] for label in labels]]
