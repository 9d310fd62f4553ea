"""How likely a deviation from a known law is by chance: p-values of chi-square, Kolmogorov-Smirnov and a z-value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_EXPECTED = 5.0  # of a cell. Source: Cochran 1954, "Some methods for strengthening the common chi-square tests"
_TERMS = 100  # of the Kolmogorov series; it converges after a few where p is small


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom, the cells too rare for it pooled.

    Args:
        observed: counts.
        expected: of the same cells, of the same sum; what is observed where nothing is expected gives infinity.
    """
    # By what is expected alone: an order that knew the counts would choose the cells by them.
    pairs = sorted(zip(expected, observed, strict=True), key=lambda pair: pair[0])
    cells: list[list[float]] = []
    for e, o in pairs:  # the rarest first, each joined to the one before while that is too small
        if cells and cells[-1][0] < LEAST_EXPECTED:
            cells[-1][0] += e
            cells[-1][1] += o
        else:
            cells.append([e, o])
    impossible = any(e <= 0 and o > 0 for e, o in pairs)
    statistic = math.inf if impossible else math.fsum((o - e) ** 2 / e for e, o in cells if e > 0)
    return statistic, max(len(cells) - 1, 0)


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Return how likely a chi-square variable with that many degrees of freedom is as large; 1 where there are none."""
    if math.isinf(statistic):
        return 0.0
    if degrees == 0:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def changing_chi_square(observed: Tensor, shares: Tensor) -> tuple[float, int]:
    """Return the statistic and degrees of freedom of draws that each had probabilities of their own.

    The difference of counts and expectation is a sum of martingale differences; its quadratic form with the inverse of
    their covariance is chi-square for many draws, and Pearson's where all draws have the same law.

    Args:
        observed: [G] float64 counts of each group.
        shares: [n, G] float64, each draw's probability of each group.
    """
    expected = shares.sum(dim=0)
    rare = expected < LEAST_EXPECTED
    if bool(rare.any()):
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        shares = torch.cat([shares[:, ~rare], shares[:, rare].sum(dim=1, keepdim=True)], dim=1)
        expected = shares.sum(dim=0)
        if bool((observed[-1] > 0) & (expected[-1] < 1e-9)):
            return math.inf, 1
    covariance = expected.diag() - shares.T @ shares
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > 1e-6 * float(values.max().clamp_min(1e-12))  # counts sum to n, so one direction has no variance
    along = vectors[:, kept].T @ (observed - expected)
    return float((along.square() / values[kept]).sum()), int(kept.sum())


def uniform_p_value(values: Tensor) -> float:
    """Return the Kolmogorov-Smirnov p-value of `values` [n] being uniform in [0, 1].

    Source: Kolmogorov's series with the correction for small n of Stephens 1970, "Use of the Kolmogorov-Smirnov,
    Cramer-von Mises and related statistics without extensive tables".
    """
    n = values.numel()
    if n == 0:
        return 1.0
    ordered = values.to(torch.float64).sort().values
    ranks = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((ranks[1:] - ordered).amax(), (ordered - ranks[:-1]).amax()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if scaled < 0.2:  # the series needs ever more terms, and p is 1 to twelve digits
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2.0 * k * k * scaled * scaled) for k in range(1, _TERMS))
    return min(max(2.0 * math.fsum(terms), 0.0), 1.0)


def normal_p_value(z: float) -> float:
    """Return how likely a standard normal variable is as far from 0, on either side."""
    return math.erfc(abs(z) / math.sqrt(2.0))
