"""How likely a deviation from a known law is by chance: p-values that are never too small, however rare the events.

Three of the four tests bet against the law. Somebody who pays 1 and gets, for every draw, what another law gives to it
over what the law itself gives has 1 on average if the law is right. That he has k times as much is then no likelier
than 1 / k, whatever the law and however few the draws, also if the other law is made of the draws before. His money is
here the log evidence; several bets share the 1.

Source: Ville 1939, "Etude critique de la notion de collectif"; Vovk and Wang 2021, arXiv 1912.06116 (e-values).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.special import gammaln

# How strongly a law that learns holds to the one it bets against: pseudo-draws, as a multiple of all draws.
_STRENGTHS = torch.tensor([1 / 16, 1 / 4, 1.0, 4.0], dtype=torch.float64)
# The same where laws change from draw to draw: pseudo-draws of each group.
_GROUP_STRENGTHS = torch.tensor([2.0, 8.0, 32.0, 128.0], dtype=torch.float64)
# Powers of p that a sharper or flatter law is proportional to, less 1; they are those of another temperature.
TILTS = torch.tensor([-1 / 2, -1 / 8, -1 / 32, 1 / 32, 1 / 8, 1 / 2, 2.0], dtype=torch.float64)
_BLOCK = 4096


def evidence_p_value(log_evidence: Tensor) -> float:
    """Return the p-value of bets [B] that begin with equal shares of 1."""
    together = float(log_evidence.logsumexp(dim=0)) - math.log(log_evidence.numel())
    return math.exp(-max(together, 0.0))


def counts_evidence(counts: Tensor, masses: Tensor) -> Tensor:
    """Return the log evidence [B] against draws of one law, from how often each of its cells came.

    The bets are on the mean of the law and what came before (Dirichlet-multinomial).

    Args:
        counts: [C] float64.
        masses: [C] float64, the probability of each cell.
    """
    if bool(((masses <= 0) & (counts > 0)).any()):
        return torch.full_like(_STRENGTHS, math.inf)
    counts, masses = counts[masses > 0], masses[masses > 0]
    num_draws = counts.sum()
    strengths = _STRENGTHS * num_draws.clamp_min(1.0)
    own = strengths[:, None] * masses
    cells = gammaln(own + counts) - gammaln(own) - counts * masses.log()
    return gammaln(strengths) - gammaln(strengths + num_draws) + cells.sum(dim=1)


def groups_evidence(groups: Tensor, shares: Tensor) -> Tensor:
    """Return the log evidence [B] against draws that each had a law of its own.

    The bets multiply each law by how much more often than expected every group came before.

    Args:
        groups: [n] int64, of each draw, in their order.
        shares: [n, G] float64, each draw's probability of each group.
    """
    strengths = _GROUP_STRENGTHS[:, None, None]
    evidence = torch.zeros_like(_GROUP_STRENGTHS)
    seen = expected = shares.new_zeros(shares.shape[1])
    for own, probs in zip(groups.split(_BLOCK), shares.split(_BLOCK), strict=True):
        came = torch.nn.functional.one_hot(own, shares.shape[1]).to(shares.dtype)
        before, due = came.cumsum(0) - came + seen, probs.cumsum(0) - probs + expected
        factors = (strengths + before) / (strengths + due)
        evidence += ((factors * came).sum(-1).log() - (factors * probs).sum(-1).log()).sum(-1)
        seen, expected = seen + came.sum(0), expected + probs.sum(0)
    return evidence


def log_moments(log_probs: Tensor) -> Tensor:
    """Return [n, B] float64: of laws [n, V] the log of the mean of p to the power of each tilt."""
    return torch.stack([((1 + tilt) * log_probs).logsumexp(dim=-1) for tilt in TILTS.tolist()], dim=-1)


def tilts_evidence(log_probs: Tensor, moments: Tensor) -> Tensor:
    """Return the log evidence [B] of sharper and flatter laws against draws that each had a law of its own.

    Args:
        log_probs: [n] float64, of what was drawn; -inf for what cannot be.
        moments: [n, B] float64, `log_moments` of the laws.
    """
    return (log_probs[:, None] * TILTS - moments).sum(dim=0)


def uniform_p_value(values: Tensor) -> float:
    """Return the p-value of the Kolmogorov-Smirnov distance of `values` [n] from uniform ones in [0, 1].

    Source: Massart 1990, "The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality"; it holds for every n.
    """
    n = values.numel()
    if n == 0:
        return 1.0
    ordered = values.to(torch.float64).sort().values
    ranks = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((ranks[1:] - ordered).amax(), (ordered - ranks[:-1]).amax()))
    return min(1.0, 2.0 * math.exp(-2.0 * n * distance * distance))
