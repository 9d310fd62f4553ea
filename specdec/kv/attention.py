"""Attention of one request's rows over its own keys and values. Tensors in, tensors out.

Letters: m rows, H query heads, h key/value heads, G = H / h, n keys, D key width, E value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kv.plan import MaskPattern, PlannedSegment

# Up to this many rows the query heads of a group are folded into the query length: one call reads the keys once
# and needs no repeated copies. Long prefill chunks would pay for a G times larger mask instead.
FOLD_ROWS = 32
# Up to this many rows, more than any tree that is drafted by default, can be computed one by one; see `attend_rows`.
MOST_ROWS_ALONE = 64


def attend_segment(
    segment: PlannedSegment,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float | None,
    pattern: MaskPattern | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return [m, H, E].

    Args:
        segment: whose mask applies.
        q: [m, H, D].
        keys: [n, h, D], a view of the cache cut to the live length.
        values: [n, h, E].
        scaling: factor on the scores; None = 1 / sqrt(D).
        pattern: window or chunk of the layer; None = all earlier positions.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118).
        sinks: [H] extra logit per head that takes probability and gives nothing (gpt-oss).
    """
    num_rows, num_heads, width = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    k, v = keys.transpose(0, 1), values.transpose(0, 1)  # [h, n, *]
    if softcap is None and sinks is None and num_rows > FOLD_ROWS:
        causal = pattern is None and segment.whole_causal
        mask = None if causal else segment.mask(pattern, q, 1)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=group > 1,
        )
        return out[0].transpose(0, 1)
    if group == 1:
        folded = q.transpose(0, 1)
    elif num_rows == 1:
        folded = q.view(num_kv_heads, group, width)
    else:
        folded = q.view(num_rows, num_kv_heads, group, width).transpose(0, 1).reshape(num_kv_heads, -1, width)
    mask = segment.mask(pattern, q, group)
    out = _attend_folded(folded, k, v, mask, scaling, softcap, sinks, group)
    if num_rows == 1:
        return out.reshape(1, num_heads, -1)
    return out.view(num_kv_heads, num_rows, group, -1).transpose(0, 1).reshape(num_rows, num_heads, -1)


def attend_rows(
    segment: PlannedSegment,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float | None,
    pattern: MaskPattern | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what `attend_segment` does, each row computed as if it were the only one, to the last bit.

    Over a cache that quantises this matters: a last bit decides to which code a number is rounded, and a code more or
    less in one layer moves every number of the next. A row that is verified must round as one that is decoded.
    """
    num_kv_heads, width = keys.shape[1], q.shape[2]
    group = q.shape[1] // num_kv_heads
    rows = []
    for row in range(segment.num_rows):
        seen = segment.seen(row, pattern, keys.device)
        k, v = keys[seen].transpose(0, 1), values[seen].transpose(0, 1)  # [h, n, *]
        out = _attend_folded(q[row].view(num_kv_heads, group, width), k, v, None, scaling, softcap, sinks, group)
        rows.append(out.reshape(1, q.shape[1], -1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _attend_folded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    group: int,
) -> Tensor:
    """Return [h, m * G, E] of q [h, m * G, D] (rows outer, group inner), k [h, n, D] and v [h, n, E]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scaling)[0]
    return _explicit(q, k, v, mask, scaling or q.shape[-1] ** -0.5, softcap, sinks, group)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    group: int,
) -> Tensor:
    """Attention with what the fused kernels lack. q [h, m * G, D] (rows outer, group inner) -> [h, m * G, E]."""
    scores = q @ k.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        num_kv_heads, rows, _ = scores.shape
        column = sinks.to(scores.dtype).view(num_kv_heads, 1, group).expand(-1, rows // group, -1)
        scores = torch.cat([scores, column.reshape(num_kv_heads, rows, 1)], dim=-1)
    # Half precision is normalised in float32, as the models' own code does.
    wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(v.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights @ v
