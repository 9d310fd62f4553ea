"""Where a request's blocks lie, and what a full or scattered pool does to it."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import OutOfCacheError
from specdec.interfaces import Segment
from specdec.kv.cache import KVCache

NONE = torch.tensor([], dtype=torch.int64)


class TestPlacement:
    """Where blocks lie: in one run, which is read as a view, wherever there is one."""

    def runs(self, cache: KVCache, request_id: int) -> int:
        return len(cache._sequences[request_id].runs)

    def grow(self, cache: KVCache, request_id: int, rows: int) -> None:
        kv = torch.full((rows, 1, 2), float(request_id))
        kv[:, 0, 0] = torch.arange(cache.context_len(request_id), cache.context_len(request_id) + rows)
        cache.reserve(request_id, rows + 3)
        plan = cache.plan([Segment(request_id, torch.zeros(rows, dtype=torch.int64), None, NONE)])
        keys, _ = cache.append(plan, 0, kv, kv)
        n = cache.context_len(request_id) + rows
        assert keys[:, 0].tolist() == [[float(i), float(request_id)] for i in range(n)]
        cache.commit(request_id, torch.arange(rows))
        cache.check_integrity()

    def test_as_expected_everything_is_a_view(self) -> None:
        cache = KVCache(block_tokens=4)
        for i in range(4):
            cache.open(i, 41)
        for n in (1, 9, 3, 1, 1, 8, 7):
            for i in range(4):
                self.grow(cache, i, n)
                assert self.runs(cache, i) == 1
        keys = cache._storage.parts[0][0]
        assert cache._sequences[0].slices(0, 30) == [slice(0, 30)]
        assert keys[cache._sequences[0].slices(0, 30)[0]].data_ptr() == keys.data_ptr()

    @pytest.mark.parametrize("limit", [None, 16000])
    def test_hints_do_not_make_the_tensors(self, limit: int | None) -> None:
        """Hints are far more than what comes: 64 prompts that end at once, in tensors of a small multiple of them."""
        cache = KVCache(max_bytes=None if limit is None else 16 * limit, bytes_per_token=16)
        for i in range(64):
            cache.open(i, 4096, [1] * 20)
        for i in range(64):
            self.grow(cache, i, 20)
            assert self.runs(cache, i) == 1
        assert cache.num_bytes <= 16 * 64 * (20 + 128 + 48)

    @pytest.mark.parametrize("limit", [None, 13000])
    def test_a_batch_is_read_as_views(self, limit: int | None) -> None:
        """32 requests of 64 to 256 new tokens each, which end one after the other."""
        cache = KVCache(max_bytes=None if limit is None else 16 * limit, bytes_per_token=16)
        prompts = {i: 16 + 37 * i % 284 for i in range(32)}
        left = {i: 64 + 53 * i % 193 for i in range(32)}
        for i, n in prompts.items():
            cache.open(i, n + 4096, [1] * n)
            self.grow(cache, i, n)
        runs = []
        while left:
            for i in list(left):
                n = min(left[i], 16)
                self.grow(cache, i, n)
                left[i] -= n
            runs.append(cache.usage()["runs_per_request"])
            for i in [i for i, n in left.items() if not n]:
                cache.release(i)
                del left[i]
        assert sum(runs) / len(runs) <= 1.05
        assert cache.num_bytes <= 16 * 3 * 32 * (158 + 160)

    def test_who_outgrows_its_place_moves_to_a_longer_one(self) -> None:
        cache = KVCache(block_tokens=4)
        for i in range(3):
            cache.open(i, 8)
        for _ in range(40):
            for i in range(3):
                self.grow(cache, i, 2)
                assert self.runs(cache, i) == 1
        assert cache.num_bytes <= 16 * 3 * 4 * 4 * 80, "what was left is used again"

    @pytest.mark.parametrize("published", [False, True])
    def test_a_hint_beyond_all_measure_leaves_no_hole(self, published: bool) -> None:
        cache = KVCache(block_tokens=16, prefix_caching=published)
        cache.open(0, 10**9)
        cache.open(1, 10**9)
        for _ in range(12):
            for i in range(2):
                self.grow(cache, i, 150)
                cache.publish(i, [i] * 2000)
                assert self.runs(cache, i) == 1
        assert cache.num_bytes <= 16 * 8 * 2048
        if published:
            assert cache.open(2, 0, [1] * 2000) == 1792, "blocks are found where they moved to"
            assert cache._sequences[2].blocks == cache._sequences[1].blocks[:112]

    def test_in_a_full_pool_pieces_are_put_together(self) -> None:
        cache = KVCache(block_tokens=2, max_bytes=20 * 2 * 16, bytes_per_token=16)
        for i in range(3):
            cache.open(i, 8)
        for i in (0, 1, 2, 1, 0, 2):
            self.grow(cache, i, 5)
        cache.release(1)
        for _ in range(8):
            self.grow(cache, 0, 1)
        assert self.runs(cache, 0) > 1
        for _ in range(4):
            self.grow(cache, 2, 1)
        with pytest.raises(OutOfCacheError):
            cache.reserve(0, 30)

    def test_many_pieces(self) -> None:
        """More than are concatenated: gathered by index."""
        cache = KVCache(block_tokens=1)
        cache.open(0, 0)
        cache.open(1, 0)
        table = cache._sequences[0]
        cache.reserve(0, 1)
        cache.commit(0, NONE)
        for i in range(32):
            cache._allocation.pool.claim(0, 0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cache._allocation, "_move", lambda *args: False)
                self.grow(cache, i % 2, 1)
        assert len(table.runs) > 8
        assert cache.usage()["runs_per_request"] > 8

    def test_what_a_rollback_frees_can_be_had_by_others(self) -> None:
        cache = KVCache(block_tokens=4, max_bytes=4 * 4 * 16, bytes_per_token=16)
        for i in range(2):
            cache.open(i, 8)
        self.grow(cache, 0, 4)
        cache.reserve(0, 12)
        assert cache.num_free_blocks == 0
        cache.rewind(0)
        assert cache.num_free_blocks == 0, "the reservation stays open"
        cache.commit(0, NONE)
        assert cache.num_free_blocks == 3
        cache.reserve(1, 12)
        usage = cache.usage()
        assert (usage["num_used"], usage["num_free"], usage["num_cached"], usage["num_blocks"]) == (4, 0, 0, 4)
        assert usage["fragmentation"] == 0.75
        assert usage["runs_per_request"] == 1.0
