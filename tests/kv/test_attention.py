"""`KVCache.attend` against the formula, written out: widths, windows, caps and sinks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.interfaces import Segment
from specdec.kv.cache import KVCache
from specdec.kv.codecs import QuantisedKV
from specdec.kv.plan import MaskPattern, sliding_window

NONE = torch.tensor([], dtype=torch.int64)


class TestAttention:
    """`attend` against the textbook formula."""

    def expected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        allowed: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
        weights = scores.softmax(dim=-1)
        return (weights[..., :-1] if sinks is not None else weights).matmul(v).transpose(0, 1)

    @pytest.mark.parametrize("rows", [1, 5, 40])
    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    @pytest.mark.parametrize("kind", ["plain", "window", "softcap", "sinks", "tree"])
    @pytest.mark.parametrize("alone", [False, True], ids=["together", "row_by_row"])
    def test_all_kinds(self, rows: int, kv_heads: int, kind: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KVCache, "rounds_alike", alone)
        generator = torch.Generator().manual_seed(rows)
        context, heads, key, value = 6, 4, 8, 12

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        k, v = draw(context + rows, kv_heads, key), draw(context + rows, kv_heads, value)
        q = draw(context + rows, heads, key)
        cache = KVCache()
        cache.open(7, 3)  # so that the request does not begin at slot 0
        cache.open(0, context + rows)
        parents = [max(-1, i - 1 - i % 3) for i in range(rows)] if kind == "tree" else None
        pattern: MaskPattern | None = sliding_window(4) if kind == "window" else None
        options: dict[str, Any] = {"scaling": 0.3, "pattern": pattern}
        if kind == "softcap":
            options["softcap"] = 1.5
        if kind == "sinks":
            options["sinks"] = draw(heads)
        got = []
        for where, tree in ((slice(0, context), None), (slice(context, context + rows), parents)):
            n = where.stop - where.start
            cache.reserve(0, n)
            segment = Segment(0, torch.zeros(n, dtype=torch.int64), None if tree is None else torch.tensor(tree), NONE)
            got.append(cache.attend(cache.plan([segment]), 0, q[where], k[where], v[where], **options))
            if where.start == 0:
                cache.commit(0, torch.arange(n))
        position = torch.arange(context + rows)
        allowed = position <= position[:, None]
        if kind == "window":
            allowed &= position > position[:, None] - 4
        if parents is not None:
            allowed[context:, context:] = torch.eye(rows, dtype=torch.bool)
            for i, parent in enumerate(parents):
                if parent >= 0:
                    allowed[context + i, context:] |= allowed[context + parent, context:]
        sinks = options.get("sinks")
        want = self.expected(q, k, v, allowed, 0.3, options.get("softcap"), sinks)
        torch.testing.assert_close(torch.cat(got), want, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("kind", ["chain", "window", "tree", "softcap"])
    @pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
    def test_a_row_over_a_quantised_cache_is_the_same_bits_in_any_company(self, kind: str, kv_dtype: str) -> None:
        """A last bit decides to which code a number of the next layer is rounded."""
        generator = torch.Generator().manual_seed(3)
        context, heads, kv_heads, width = 301, 9, 3, 64
        total = context + 7
        parents = [-1, 0, 1, 0, 3, 3, 1] if kind == "tree" else None
        paths = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 3, 5], [0, 1, 6]]
        q = torch.randn(total, heads, width, generator=generator)
        k, v = (torch.randn(total, kv_heads, width, generator=generator) for _ in range(2))
        options: dict[str, Any] = {
            "pattern": sliding_window(50) if kind == "window" else None,
            "softcap": 3.0 if kind == "softcap" else None,
        }

        def attend(cache: KVCache, rows: list[int], tree: list[int] | None = None) -> Tensor:
            cache.reserve(0, len(rows))
            above = None if tree is None else torch.tensor(tree)
            segment = Segment(0, torch.zeros(len(rows), dtype=torch.int64), above, NONE)
            index = torch.tensor(rows)
            return cache.attend(cache.plan([segment]), 0, q[index], k[index], v[index], **options)

        def begun() -> KVCache:
            cache = KVCache(codec=QuantisedKV(kv_dtype))
            cache.open(0, total)
            attend(cache, list(range(context)))
            cache.commit(0, torch.arange(context))
            return cache

        together = attend(begun(), list(range(context, total)), parents)
        for row in range(7):
            cache = begun()
            for step in paths[row] if kind == "tree" else range(row + 1):
                alone = attend(cache, [context + step])
                cache.commit(0, torch.arange(1))
            assert torch.equal(alone[0], together[row]), row

    def test_the_default_scale(self) -> None:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(3, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
        cache = KVCache()
        cache.open(0, 3)
        cache.reserve(0, 3)
        got = cache.attend(cache.plan([Segment(0, torch.zeros(3, dtype=torch.int64), None, NONE)]), 0, q, k, v)
        position = torch.arange(3)
        want = self.expected(q, k, v, position <= position[:, None], 1 / math.sqrt(4), None, None)
        torch.testing.assert_close(got, want)
