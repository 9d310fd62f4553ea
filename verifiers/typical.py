"""Medusa's typical acceptance: keep draft tokens that are likely enough for how sure the target is."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.interfaces import Noise, TargetRows, TokenTree, VerifyResult
from specdec.verifiers.accepted_sets import longest_accepted

_INSIDE_LOG = 1e-5  # Source: FasterDecoding/Medusa, medusa/model/utils.py, evaluate_posterior


class TypicalVerifier:
    """Accept draft tokens above min(threshold, alpha * exp(-entropy)) of the target; LOSSY above temperature 0.

    The longest accepted path is kept, of equally long ones the likeliest, and the token after it is the target's own.
    At temperature 0 that is exact matching.

    Args:
        posterior_threshold: accepted whatever the entropy, in [0, 1).
        posterior_alpha: lowers the bar where the target is unsure, > 0; the authors advise the threshold's root.

    Raises:
        ConfigError: an option is out of range.

    Source: Cai et al. 2024, arXiv 2401.10774, section 2.3.1, with the defaults of their code.
    """

    name = "typical"
    lossless = False
    lossless_if_greedy = True
    needs_all_rows = True
    couples_draft = True  # a draft that the target itself would have drawn is no loss

    def __init__(self, posterior_threshold: float = 0.09, posterior_alpha: float = 0.3) -> None:
        if not _is_number(posterior_threshold) or not 0.0 <= posterior_threshold < 1.0:
            raise ConfigError(
                f"typical verifier: posterior_threshold={posterior_threshold!r}; allowed: 0 up to below 1"
            )
        if not _is_number(posterior_alpha) or not 0.0 < posterior_alpha < float("inf"):
            raise ConfigError(f"typical verifier: posterior_alpha={posterior_alpha!r}; allowed: a number above 0")
        self.posterior_threshold, self.posterior_alpha = float(posterior_threshold), float(posterior_alpha)

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        """Return the longest accepted paths and the token after each; see `longest_accepted`."""
        accepts = partial(_accepts, threshold=self.posterior_threshold, alpha=self.posterior_alpha)
        return longest_accepted(tree, target, noise, accepts)


def _accepts(probs: Tensor, token_ids: Tensor, threshold: float, alpha: float) -> Tensor:
    """Return [L, C] bool for distributions [L, V] and tokens [L, C]."""
    entropy = -(probs * (probs + _INSIDE_LOG).log()).sum(dim=-1, keepdim=True)
    bar = (alpha * torch.exp(-entropy)).clamp_max(threshold)
    return probs.gather(1, token_ids) > bar


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
