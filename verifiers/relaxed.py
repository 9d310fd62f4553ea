"""Relaxed acceptance: keep draft tokens among the target's likeliest that come close to the best one."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from specdec.errors import ConfigError
from specdec.interfaces import Noise, TargetRows, TokenTree, VerifyResult
from specdec.verifiers.accepted_sets import longest_accepted


class RelaxedVerifier:
    """Accept draft tokens of the target's top-k at most delta less likely than the best; LOSSY above temperature 0.

    The longest accepted path is kept, of equally long ones the likeliest, and the token after it is the target's own.
    At temperature 0 that is exact matching. TensorRT-LLM relaxes inside of a model's thinking only; here it is
    everywhere.

    Args:
        relaxed_topk: how many of the likeliest tokens are candidates, >= 1; ties with the last one included.
        relaxed_delta: how much less likely than the best one they may be, in [0, 1). Advised for thinking: 10 and 0.6.

    Raises:
        ConfigError: an option is out of range.

    Source: NVIDIA TensorRT-LLM, tech blog 2 (DeepSeek-R1 MTP, relaxed acceptance), names and defaults included.
    """

    name = "relaxed"
    lossless = False
    lossless_if_greedy = True
    needs_all_rows = True
    couples_draft = True  # a draft that the target itself would have drawn is no loss

    def __init__(self, relaxed_topk: int = 1, relaxed_delta: float = 0.0) -> None:
        if not isinstance(relaxed_topk, int) or isinstance(relaxed_topk, bool) or relaxed_topk < 1:
            raise ConfigError(f"relaxed verifier: relaxed_topk={relaxed_topk!r}; allowed: an integer >= 1")
        is_number = isinstance(relaxed_delta, int | float) and not isinstance(relaxed_delta, bool)
        if not is_number or not 0.0 <= relaxed_delta < 1.0:
            raise ConfigError(f"relaxed verifier: relaxed_delta={relaxed_delta!r}; allowed: 0 up to below 1")
        self.relaxed_topk, self.relaxed_delta = relaxed_topk, float(relaxed_delta)

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        """Return the longest accepted paths and the token after each; see `longest_accepted`."""
        accepts = partial(_accepts, top_k=self.relaxed_topk, delta=self.relaxed_delta)
        return longest_accepted(tree, target, noise, accepts)


def _accepts(probs: Tensor, token_ids: Tensor, top_k: int, delta: float) -> Tensor:
    """Return [L, C] bool for distributions [L, V] and tokens [L, C]."""
    best = probs.topk(min(top_k, probs.shape[-1]), dim=-1).values
    chosen = probs.gather(1, token_ids)
    return (chosen > 0) & (chosen >= best[:, -1:]) & (chosen >= best[:, :1] - delta)
