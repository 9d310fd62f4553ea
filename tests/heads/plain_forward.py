"""An EAGLE head computed the slow way: all rows at once, plain causal attention, nothing kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.heads.loaded import LoadedHead
from specdec.interfaces import FeatureSpec


def features_of(model: Any, token_ids: Sequence[int], spec: FeatureSpec) -> Tensor:
    """Return [n, F] hidden states of a transformers model, by hooks on its own blocks."""
    found: list[Tensor] = []
    blocks = [model.model.layers[i] for i in spec.layers]
    hooks = [
        b.register_forward_hook(lambda m, a, out: found.append(out[0] if isinstance(out, tuple) else out))
        for b in blocks
    ]
    with torch.no_grad():
        last = model.model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state
    for hook in hooks:
        hook.remove()
    return torch.cat([*found, *([last] if spec.final_norm else [])], dim=-1)[0]


def plain_forward(head: LoadedHead, hidden: Tensor, token_ids: Sequence[int], first: int = 0) -> Tensor:
    """Return [n, H] what the head says after each row of one text.

    Args:
        head: whose module.
        hidden: [n, H] of positions `first` on.
        token_ids: n of the positions behind.
        first: position of the first row; the head sees nothing before it.
    """
    module: Any = head.module
    group = module.config.num_heads // module.config.num_kv_heads
    size = hidden.shape[0]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)

    with torch.no_grad():
        embedded = module.embed_tokens(torch.tensor(list(token_ids)))
        said: Tensor = module(hidden, embedded, torch.arange(first, first + size), attend)
    return said


def said_after(
    head: LoadedHead, features: Tensor, token_ids: Sequence[int], drafts: Sequence[int], first: int = 0
) -> Tensor:
    """Return [1 + drafts, H] what the head says after a text and after each draft token behind it.

    Args:
        head: whose module.
        features: [n, F] of the target, positions `first` .. `first` + n - 1.
        token_ids: n of the positions behind, the root last.
        drafts: tokens of one path below the root.
        first: position of the first row.
    """
    module: Any = head.module
    with torch.no_grad():
        hidden, tokens = module.fuse(features), list(token_ids)
        found = [plain_forward(head, hidden, tokens, first)[-1:]]
        for draft in drafts:
            hidden, tokens = torch.cat([hidden, found[-1]]), [*tokens, draft]
            found.append(plain_forward(head, hidden, tokens, first)[-1:])
    return torch.cat(found)
