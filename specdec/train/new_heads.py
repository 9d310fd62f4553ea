"""Untrained drafters for a target, with the beginnings that were found to learn fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.loaded import share_with_target
from specdec.heads.medusa import MedusaConfig, MedusaHeads
from specdec.heads.target import HeadTarget
from specdec.train.capture import fused_layers
from specdec.train.store import Example

_SKIPPED = 5  # first positions: some models put activations thousands of times larger there
# A fresh block behind the target's own final norm makes logits far too sharp.
MEDUSA_HEADS = 4  # unless an option says otherwise
_NORM_SHARE = 0.2


def new_eagle3(
    target: HeadTarget,
    vocabulary: DraftVocabulary,
    *,
    norm: Tensor | None = None,
    intermediate_size: int | None = None,
    num_layers: int = 1,
) -> EagleHead:
    """Return an EAGLE-3 head in the target's own proportions, around its embedding and output rows.

    Args:
        target: whose head it is.
        vocabulary: what it drafts.
        norm: [H] scale of the target's own last hidden state per channel; None = 1.
        intermediate_size: of the MLP; None = the target's.
        num_layers: decoder layers.
    """
    config = target.config
    width = config.hidden_size
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0})
    if rope.get("rope_type", "default") != "default":
        rope = {"rope_theta": rope.get("rope_theta", 10000.0)}  # a head's context is short
    head = EagleHead(
        EagleConfig(
            generation=3,
            hidden_size=width,
            target_hidden_size=width,
            vocab_size=target.vocab_size,
            draft_vocab_size=vocabulary.size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or width // heads,
            intermediate_size=intermediate_size or getattr(config, "intermediate_size", 4 * width),
            feature_layers=fused_layers(target.num_layers),
            num_layers=num_layers,
            norm_eps=getattr(config, "rms_norm_eps", 1e-5),
            rope_parameters=rope,
            max_positions=getattr(config, "max_position_embeddings", 2048),
        )
    )
    share_with_target(head, vocabulary, target)
    assert head.norm is not None, "EAGLE-3 has a final norm"
    with torch.no_grad():
        head.norm.weight.copy_(torch.as_tensor(1.0 if norm is None else norm) * _NORM_SHARE)
    return head


def new_medusa(
    target: HeadTarget, vocabulary: DraftVocabulary, *, num_heads: int = MEDUSA_HEADS, num_layers: int = 1
) -> Any:
    """Return Medusa heads that end in the target's lm_head and begin as the identity."""
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size,
        num_heads=num_heads,
        num_layers=num_layers,
    )
    heads = MedusaHeads(config)
    share_with_target(heads, vocabulary, target)
    return heads


def feature_rms(examples: Sequence[Example], num_examples: int = 200) -> Tensor:
    """Return [F] float32: the root mean square of each channel of the features, behind the first positions."""
    squares, count = torch.zeros(examples[0].features.shape[1]), 0
    for example in examples[:num_examples]:
        rows = example.features[_SKIPPED:].to(torch.float32)
        squares += rows.pow(2).sum(dim=0)
        count += rows.shape[0]
    return (squares / max(count, 1)).sqrt().clamp_min(1e-6)
