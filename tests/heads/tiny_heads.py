"""Random heads for the tiny targets of tests/models/architectures.py, ready to draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec.heads.draft_vocabulary import DraftVocabulary
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
