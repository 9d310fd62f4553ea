"""Small random heads and the target they belong to, without running a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from specdec.heads.draft_vocabulary import DraftVocabulary, whole_vocabulary
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.loaded import LoadedHead, share_with_target
from specdec.heads.medusa import MedusaConfig, MedusaHeads
from specdec.heads.target import HeadTarget

WIDTH, VOCAB_SIZE, NUM_LAYERS = 32, 64, 6


def small_target(dtype: torch.dtype = torch.float32) -> HeadTarget:
    """Return a target with random embedding and output rows."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return HeadTarget(
        name="a/target",
        hidden_size=WIDTH,
        vocab_size=VOCAB_SIZE,
        num_layers=NUM_LAYERS,
        embedding=nn.Embedding(VOCAB_SIZE, WIDTH).to(dtype).requires_grad_(False),
        output_weight=torch.randn(VOCAB_SIZE, WIDTH).to(dtype),
        dtype=dtype,
        device=torch.device("cpu"),
        config=config,
    )


def small_eagle(target: HeadTarget, *, drafted: int = 24, own_rows: bool = False, **options: Any) -> LoadedHead:
    """Return a random EAGLE-3 head, norms included, that drafts every other token from the first `drafted` pairs."""
    torch.manual_seed(11)
    fields: dict[str, Any] = {
        "generation": 3, "hidden_size": WIDTH, "target_hidden_size": WIDTH, "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": drafted, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 40,
        "feature_layers": (1, 2, 4), "max_positions": 128,
    }  # fmt: skip
    module = EagleHead(EagleConfig(**(fields | options)))
    if own_rows:
        module.lm_head = nn.Linear(module.config.hidden_size, drafted, bias=False)
        module.shares_lm_head = False
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1)
    whole = drafted == VOCAB_SIZE
    vocabulary = whole_vocabulary(VOCAB_SIZE) if whole else DraftVocabulary(torch.arange(drafted) * 2 + 1, VOCAB_SIZE)
    module.to(target.dtype).eval().requires_grad_(False)
    share_with_target(module, vocabulary, target)
    return LoadedHead(module, vocabulary, "a/head", "specdec")


def small_medusa(target: HeadTarget, **options: Any) -> LoadedHead:
    """Return random Medusa heads that end in the target's lm_head."""
    torch.manual_seed(13)
    fields: dict[str, Any] = {
        "hidden_size": WIDTH, "vocab_size": VOCAB_SIZE, "draft_vocab_size": VOCAB_SIZE, "num_heads": 2,
    }  # fmt: skip
    module = MedusaHeads(MedusaConfig(**(fields | options))).to(target.dtype).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    vocabulary = whole_vocabulary(VOCAB_SIZE)
    share_with_target(module, vocabulary, target)
    return LoadedHead(module, vocabulary, "a/medusa", "specdec")
