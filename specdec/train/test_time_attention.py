"""Attention of the training-time test: every position drafts some steps on its own, over true rows of the past.

At step 0 all rows are true and attention is causal. At step j the row of position t stands j places further on; it
sees the true rows up to t and the rows that position t itself drafted at steps 1 .. j, which is what it will see when
it drafts::

    keys:     true rows        step 1     step 2
              0 1 2 3          0 1 2 3    0 1 2 3
    query 2   1 1 1 0          0 0 1 0    0 0 1 0

Source: Li et al. 2025, arXiv 2503.01840 (EAGLE-3), "training-time test".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class TestTimeAttention:
    """Attention for one batch, [B, S] rows at step 0 and its last R columns at later steps.

    Args:
        is_token: [B, S] bool, false in the padding at the left.
        columns: R.
    """

    __test__ = False  # no test of pytest's

    def __init__(self, is_token: Tensor, columns: int) -> None:
        size = is_token.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=is_token.device).tril()
        # A padding row sees itself: a row of nothing but -inf would be NaN.
        own = torch.eye(size, dtype=torch.bool, device=is_token.device)
        self._mask = ((causal & is_token[:, None, :]) | own)[:, None]  # [B, 1, S, S]
        self._later = self._mask[:, :, size - columns :]
        self._own = torch.eye(columns, dtype=torch.bool, device=is_token.device).expand(
            is_token.shape[0], 1, columns, columns
        )
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, rows, heads, D] each -> [B, rows, heads, D]. Called once per layer and step, in order."""
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        step = len(keys) - 1
        mask = self._mask if step == 0 else torch.cat([self._later, *([self._own] * step)], dim=-1)
        q, k, v = q.transpose(1, 2), torch.cat(keys, dim=1).transpose(1, 2), torch.cat(values, dim=1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)
