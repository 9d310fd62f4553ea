"""Writing and masking a step: one call per tensor, and never a look at a tensor that a GPU's caller would wait for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.interfaces import Segment
from specdec.kv.cache import KVCache
from specdec.kv.plan import MaskPattern, StepPlan, sliding_window

NONE = torch.tensor([], dtype=torch.int64)
CHUNKS = MaskPattern("chunks", lambda query, key: query // 4 == key // 4, 4)


class Calls(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def segment(request_id: int, n: int, parents: list[int] | None = None) -> Segment:
    tree = None if parents is None else torch.tensor(parents)
    return Segment(request_id, torch.zeros(n, dtype=torch.int64), tree, NONE)


def rows(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def filled(codec: str | None = None) -> KVCache:
    """Return a cache with six tokens of request 0, three of request 1 and none of request 2, all in pieces."""
    cache = KVCache(block_tokens=2, codec=codec, bytes_per_token=128, max_bytes=128 * 2 * 12)
    for request_id in range(3):
        cache.open(request_id, 0)
    for step in range(3):
        for request_id, n in ((0, 2), (1, 1)):
            cache.reserve(request_id, n)
            cache.attend(cache.plan([segment(request_id, n)]), 0, *rows(n, 10 * request_id + step))
            cache.commit(request_id, torch.arange(n))
    return cache


SEGMENTS = [segment(0, 3), segment(1, 4, [-1, 0, 0, 1]), segment(2, 2)]


def planned(cache: KVCache, segments: list[Segment]) -> StepPlan:
    for s in segments:
        cache.reserve(s.request_id, len(s.token_ids))
    return cache.plan(segments)


@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_a_packed_step_stores_what_each_alone_does(codec: str | None) -> None:
    together, alone = filled(codec), filled(codec)
    q, k, v = rows(9, 50)
    together.attend(planned(together, SEGMENTS), 0, q, k, v)
    first = 0
    for s in SEGMENTS:
        part = slice(first, first + len(s.token_ids))
        alone.attend(planned(alone, [s]), 0, q[part], k[part], v[part])
        first = part.stop
    for request_id, kept in ((0, [0, 1, 2]), (1, [0, 1, 3]), (2, [0, 1])):
        for cache in (together, alone):
            cache.commit(request_id, torch.tensor(kept))
        for a, b in zip(together.stored(request_id, 0), alone.stored(request_id, 0), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("codec", "parts"), [(None, 2), ("int8", 4)])
def test_one_write_per_tensor_and_layer(codec: str | None, parts: int) -> None:
    cache = filled(codec)
    plan = planned(cache, SEGMENTS)
    with Calls() as calls:
        for layer in (0, 0, 0):
            cache._write(plan, layer, *rows(9, 50)[1:])
    assert calls.counts["index_copy_"] == 3 * parts
    assert calls.counts["copy_"] == 0, "nothing is written piece by piece"


def test_one_chain_in_one_piece_is_written_as_a_slice() -> None:
    cache = KVCache()
    cache.open(0, 8)
    plan = planned(cache, [segment(0, 8)])
    with Calls() as calls:
        cache._write(plan, 0, *rows(8, 50)[1:])
    assert calls.counts["index_copy_"] == 0


@pytest.mark.parametrize(
    "pattern", [None, sliding_window(2), sliding_window(64), CHUNKS], ids=lambda p: str(p and p.key)
)
def test_no_mask_is_looked_at(pattern: MaskPattern | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    plan = planned(cache, [segment(0, 1), SEGMENTS[1], segment(2, 2)])
    if pattern is not None:
        _ = pattern.window  # arithmetic on the CPU

    def waits(self: Tensor, *args: Any) -> Any:
        raise AssertionError("a GPU's caller waits here")

    for name in ("__bool__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    cache.attend(plan, 0, *rows(7, 50), pattern=pattern)


@pytest.mark.parametrize(("size", "masked"), [(6, True), (7, False), (64, False)])
def test_a_row_that_sees_all_needs_no_mask(size: int, masked: bool) -> None:
    cache = filled()
    (s,) = planned(cache, [segment(0, 1)]).segments
    mask = s.mask(sliding_window(size), torch.zeros(()), 1)
    assert (mask is not None) is masked
    if mask is not None:
        assert (mask[0] == 0).tolist() == [p > 6 - size for p in range(7)]


def test_a_tree_that_is_a_chain_is_one() -> None:
    cache = filled()
    for parents in ([-1, 0, 1], [-1], [-1, 0]):
        (s,) = planned(cache, [segment(0, len(parents), parents)]).segments
        assert s.visible is None
        assert s.positions.tolist() == list(range(6, 6 + len(parents)))
    cache.reserve(0, 4)
    first, second, third = (cache.plan([segment(0, len(p), p)]).segments[0] for p in ([-1], [0], [0]))
    assert (first.visible, second.visible) == (None, None)
    assert third.visible is not None, "a second child of the root"
    assert third.positions.tolist() == [7]
    assert third.visible[0].tolist() == [True] * 7 + [False, True]
