"""`flash_attn_varlen_func` of flash-attn 2.8 in plain torch: what its documentation and its checks of inputs say.

Source: the package's `flash_attn/flash_attn_interface.py` and `csrc/flash_attn/flash_api.cpp` (`mha_varlen_fwd`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specdec.kv.flash import FlashBackend


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """q [total_q, H, D], k and v [blocks, page, h, D] -> [total_q, H, D]."""
    assert block_table is not None and dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs
    assert q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype"
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("block_table", block_table)):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), name
    blocks, page, kv_heads, width = k.shape
    batch = len(cu_seqlens_q) - 1
    assert page % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert width <= 256 and width % 8 == 0 and q.shape[2] == width and v.shape == k.shape
    assert q.shape[1] % kv_heads == 0
    assert len(cu_seqlens_k) == batch + 1 and block_table.shape[0] == batch
    assert int(block_table.min()) >= 0 and int(block_table.max()) < blocks
    assert int(cu_seqlens_q[-1]) == q.shape[0]
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    outputs = []
    for b in range(batch):
        rows, length = int(cu_seqlens_q[b + 1] - cu_seqlens_q[b]), int(cu_seqlens_k[b + 1] - cu_seqlens_k[b])
        assert rows <= max_seqlen_q and length <= max_seqlen_k <= block_table.shape[1] * page
        used = block_table[b, : -(-length // page)].long()
        keys, values = (t[used].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // kv_heads, 1) for t in (k, v))
        own = q[int(cu_seqlens_q[b]) : int(cu_seqlens_q[b + 1])]
        scores = torch.einsum("ihd,jhd->hij", own, keys) * (width**-0.5 if softmax_scale is None else softmax_scale)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.arange(rows)[:, None] + length - rows, torch.arange(length)  # aligned at the bottom right
        left, right = window_size[0], 0 if causal else window_size[1]
        allowed = torch.ones(rows, length, dtype=torch.bool)
        if left >= 0:
            allowed &= j >= i - left
        if right >= 0:
            allowed &= j <= i + right
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(outputs)


class Emulated(FlashBackend):
    """The backend over the emulation: on CPUs, and in float64, in which nothing but a mistake differs."""

    device_type = "cpu"
    dtypes = (torch.float64, torch.float16, torch.bfloat16)

    def __init__(self) -> None:
        super().__init__(flash_attn_varlen_func, "emulated")


def fake_package(**attributes: Any) -> ModuleType:
    """Return a module like flash_attn."""
    package = ModuleType("flash_attn")
    vars(package).update({"__version__": "2.8.3", "flash_attn_varlen_func": flash_attn_varlen_func, **attributes})
    return package
