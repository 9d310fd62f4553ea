"""A model that goes round in circles of eight tokens, and says the same after each of its layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.models.architectures import build, named

CIRCLE = 8


def following(token_id: int) -> int:
    """Return the token that the looping model says after another."""
    return token_id // CIRCLE * CIRCLE + (token_id + 1) % CIRCLE


@cache
def looping_model() -> Any:
    """Return a Llama whose blocks add nothing: the likeliest next token is `following` of the last one."""
    model = build(named("llama"))
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        embedding.div_(embedding.norm(dim=-1, keepdim=True))
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for token_id in range(embedding.shape[0]):
            model.lm_head.weight[following(token_id)] = embedding[token_id]
    return model
