"""How far two distributions are from each other: exactly, from log-probabilities, or estimated from samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.errors import InputError
from specdec.eval.metrics.columns import check_equal_lengths

_SMOOTHING = 0.5  # added to each count. Source: Krichevsky and Trofimov 1981, the estimator named after them
_ROUNDS = 200  # random splits of the pooled samples
_NORMALISED = 1e-3  # how far the log of a distribution's sum may be from 0: float16 rows pass

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleDistances:
    """Means over prompts. `*_null`: the same of samples that are split at random, thus of equal distributions."""

    total_variation: float
    total_variation_null: float
    p_value: float  # of the random splits, how many are at least as far apart in total variation
    kl_divergence: float  # in nats, of the references from the predictions
    kl_divergence_null: float


def sample_distances(
    predicted: Sequence[Sequence[Sequence[int]]], reference: Sequence[Sequence[Sequence[int]]]
) -> SampleDistances | None:
    """Return the distances of two sets of sampled token sequences per prompt; None of no prompt.

    Total variation is that of the two empirical distributions over whole sequences (plug-in). It is above 0 for
    samples of one distribution too, the more so the fewer there are: the value under random splits says how much.
    For KL each outcome seen in either set gets half a count more (Krichevsky-Trofimov), which keeps it finite.

    Args:
        predicted: per prompt, its samples.
        reference: likewise; numbers of samples may differ.

    Raises:
        InputError: unequal numbers of prompts, or one without samples.
    """
    check_equal_lengths({"predicted_samples": predicted, "reference_samples": reference})
    if not predicted:
        return None
    own, null = np.zeros(2), np.zeros((_ROUNDS, 2))
    source = np.random.default_rng(0)  # so that a report can be made again
    for prompt, (ours, theirs) in enumerate(zip(predicted, reference, strict=True)):
        if not ours or not theirs:
            raise InputError(f"prompt {prompt} has {len(ours)} and {len(theirs)} samples; give at least one of each")
        labels, count = _labels([*ours, *theirs])
        own += _split_distances(labels, len(ours), count)
        for i in range(_ROUNDS):
            null[i] += _split_distances(source.permutation(labels), len(ours), count)
    # Less than a rounding error below counts as equal: the sums may be of the same terms in another order.
    p_value = (1 + int((null[:, 0] >= own[0] - 1e-9).sum())) / (_ROUNDS + 1)
    (tv, kl), (tv_null, kl_null) = own / len(predicted), null.mean(0) / len(predicted)
    return SampleDistances(float(tv), float(tv_null), p_value, float(kl), float(kl_null))


def _labels(samples: Sequence[Sequence[int]]) -> tuple[Ints, int]:
    """Return [n] the number of each sample's outcome, and how many outcomes there are."""
    numbers: dict[tuple[int, ...], int] = {}
    labels = [numbers.setdefault(tuple(sample), len(numbers)) for sample in samples]
    return np.array(labels, dtype=np.int64), len(numbers)


def _split_distances(labels: Ints, num_predicted: int, num_outcomes: int) -> Floats:
    """Return [2] total variation and KL of the samples behind `num_predicted` from those before."""
    ours = np.bincount(labels[:num_predicted], minlength=num_outcomes).astype(np.float64)
    theirs = np.bincount(labels[num_predicted:], minlength=num_outcomes).astype(np.float64)
    total_variation = np.abs(ours / ours.sum() - theirs / theirs.sum()).sum() / 2
    q, p = ((counts + _SMOOTHING) / (counts.sum() + _SMOOTHING * num_outcomes) for counts in (ours, theirs))
    return np.array([total_variation, (p * np.log(p / q)).sum()])


@dataclass(frozen=True, slots=True)
class LogprobDistances:
    """Over rows, one row per position."""

    total_variation: float  # mean
    total_variation_max: float
    kl_divergence: float  # mean, in nats, of the references from the predictions; may be infinite


def logprob_distances(
    predicted: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> LogprobDistances | None:
    """Return the exact distances of distributions given as log-probabilities, row by row; None of no row.

    Args:
        predicted: rows of log-probabilities over the same tokens, -inf for those that cannot come.
        reference: likewise.

    Raises:
        InputError: shapes differ, or a row is no distribution.
    """
    check_equal_lengths({"predicted_logprobs": predicted, "reference_logprobs": reference})
    if not len(predicted):
        return None
    distances = []
    for row, (ours, theirs) in enumerate(zip(predicted, reference, strict=True)):
        q, p = (_distribution(values, row, name) for values, name in ((ours, "predicted"), (theirs, "reference")))
        if q.shape != p.shape:
            raise InputError(f"row {row} has {q.size} predicted and {p.size} reference log-probabilities; give as many")
        seen = np.exp(p) > 0  # of what never comes nothing counts, also where it is finite: 0 times infinity is none
        kl = float((np.exp(p[seen]) * (p[seen] - q[seen])).sum())
        distances.append((float(np.abs(np.exp(q) - np.exp(p)).sum() / 2), kl))
    variation, divergence = zip(*distances, strict=True)
    return LogprobDistances(float(np.mean(variation)), max(variation), float(np.mean(divergence)))


def _distribution(values: Sequence[float], row: int, name: str) -> Floats:
    """Return log-probabilities, normalised."""
    found = np.asarray(values, dtype=np.float64)
    log_sum = float(np.logaddexp.reduce(found)) if found.size and not np.isnan(found).any() else np.nan
    if not abs(log_sum) <= _NORMALISED:
        raise InputError(
            f"row {row} of the {name} log-probabilities is no distribution: the log of its sum is {log_sum:.3g}, "
            "not 0; give log_softmax of logits over the whole vocabulary"
        )
    return found - log_sum
