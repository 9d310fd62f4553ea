"""Whether a target's logits are its lm_head times its last hidden state: training computes its targets that way."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from specdec.errors import IncompatibleDrafterError
from specdec.heads.target import HeadTarget
from specdec.interfaces import FeatureSpec, Segment
from specdec.models.runner import ModelRunner

_NUM_TOKENS = 4
_TOLERANCE = 0.01  # of the largest logit; half precision stays inside, a scale or a soft cap does not


def refuse_shaped_logits(runner: ModelRunner, target: HeadTarget) -> None:
    """Raise IncompatibleDrafterError if a target scales, caps or shifts what comes out of its lm_head.

    Its stored hidden states would then give other distributions than it samples from.
    """
    if target.output_weight is None:
        return  # refused by whoever needs the rows
    runner = runner.with_own_cache()
    token_ids = torch.linspace(1, target.vocab_size - 1, _NUM_TOKENS).long()
    runner.cache.open(0, _NUM_TOKENS)
    runner.cache.reserve(0, _NUM_TOKENS)
    result = runner.forward([Segment(0, token_ids, None, torch.arange(_NUM_TOKENS))], FeatureSpec((), final_norm=True))
    assert result.features is not None, "they were asked for"
    weight = target.output_weight
    plain = linear(result.features.to(weight.device, weight.dtype), weight).float()
    logits = result.logits.to(weight.device).float()
    # Of a soft cap, of which small logits know nothing, the largest ones tell most.
    apart = float((plain - logits).abs().max() / logits.abs().max())
    if not apart <= _TOLERANCE:
        raise IncompatibleDrafterError(
            f"the logits of {target.name} are not its lm_head times its last hidden state (apart by {apart:.0%} of the "
            "largest): it scales or caps them, as Gemma 2, Cohere and Granite do. Training on such targets is not "
            "supported; use a drafter that needs none ('self_int8', 'suffix', 'ngram'), or a trained checkpoint"
        )
