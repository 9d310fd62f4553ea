"""Random heads for the tiny targets of tests/models/architectures.py, ready to draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.loaded import LoadedHead, share_with_target
from specdec.heads.medusa import MedusaConfig, MedusaHeads
from specdec.heads.target import head_target
from specdec.models.runner import ModelRunner


def tiny_medusa(
    runner: ModelRunner,
    *,
    drafted: Sequence[int] | None = None,
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    **overrides: Any,
) -> LoadedHead:
    """Return random Medusa heads for the target of `runner`.

    Args:
        runner: of the target.
        drafted: the target's ids of the draft vocabulary; None = all.
        settings: what the checkpoint advises.
        seed: of the weights.
        overrides: fields of MedusaConfig; three heads of one block on the target's lm_head otherwise.
    """
    target = head_target(runner)
    ids = range(target.vocab_size) if drafted is None else drafted
    vocabulary = DraftVocabulary(torch.tensor(list(ids)), target.vocab_size)
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "draft_vocab_size": vocabulary.size,
        "num_heads": 3,
    }  # fmt: skip
    module = MedusaHeads(MedusaConfig(**(fields | overrides)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    module.to(target.dtype).eval().requires_grad_(False)
    share_with_target(module, vocabulary, target)
    return LoadedHead(module, vocabulary, "a/medusa", "specdec", dict(settings or {}))


def tiny_eagle(
    runner: ModelRunner,
    *,
    generation: int = 3,
    drafted: Sequence[int] | None = None,
    own_parts: bool = False,
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    **overrides: Any,
) -> LoadedHead:
    """Return a random EAGLE head for the target of `runner`; what it says wanders over the vocabulary.

    Args:
        runner: of the target, with at least two layers.
        generation: 1 or 3.
        drafted: the target's ids of the draft vocabulary; None = all.
        own_parts: an embedding and output rows of its own, as a head of another width needs.
        settings: what the checkpoint advises.
        seed: of the weights.
        overrides: fields of EagleConfig; four heads of width 8 with two KV heads, on blocks 0 and 1, otherwise.
    """
    target = head_target(runner)
    ids = range(target.vocab_size) if drafted is None else drafted
    vocabulary = DraftVocabulary(torch.tensor(list(ids)), target.vocab_size)
    fields: dict[str, Any] = {
        "generation": generation, "hidden_size": target.hidden_size, "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size, "draft_vocab_size": vocabulary.size, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "intermediate_size": 40, "feature_layers": (0, 1) if generation == 3 else (),
        "max_positions": 256,
    }  # fmt: skip
    config = EagleConfig(**(fields | overrides))
    module = EagleHead(config)
    if own_parts:
        module.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        module.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        module.shares_embedding = module.shares_lm_head = False
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.ndim == 1 and "norm" in name
        parameter.data = values * 0.3 + 1.0 if is_norm else values * 2 * parameter.shape[-1] ** -0.5
    module.to(target.dtype).eval().requires_grad_(False)
    share_with_target(module, vocabulary, target)
    return LoadedHead(module, vocabulary, "a/eagle", "specdec", dict(settings or {}))
