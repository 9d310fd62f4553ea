"""Prompts that begin alike share blocks: what is found, copied, evicted, and what can never be mixed up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.errors import OutOfCacheError
from specdec.interfaces import Segment
from specdec.kv import prefix
from specdec.kv.cache import KVCache
from specdec.kv.prefix import ROOT, PrefixIndex

SIZE = 4
NONE = torch.tensor([], dtype=torch.int64)


def kv_of(tokens: Sequence[int], start: int, stop: int) -> Tensor:
    """Return [n, 1, 2] rows that depend on all tokens up to each."""
    sums = [sum((i + 1) * t for i, t in enumerate(tokens[: p + 1])) for p in range(start, stop)]
    return torch.tensor([[[float(s), float(p)]] for s, p in zip(sums, range(start, stop), strict=True)])


class Shared:
    """A prefix cache filled by hand, and what each request should hold."""

    def __init__(self, max_blocks: int | None = None, featured: bool = False) -> None:
        self.cache = KVCache(block_tokens=SIZE, prefix_caching=True, bytes_per_token=16)
        if max_blocks is not None:
            self.cache.max_bytes = max_blocks * SIZE * (24 if featured else 16)
        self.featured = featured

    def begin(self, request_id: int, tokens: list[int], expected: int = 0) -> int:
        """Open a request and return how many of its tokens were found."""
        return self.cache.open(request_id, expected or len(tokens), tokens)

    def run(self, request_id: int, tokens: list[int]) -> None:
        """Compute what is missing of `tokens`, commit and publish."""
        start = self.cache.context_len(request_id)
        self.cache.reserve(request_id, len(tokens) - start)
        rows = torch.zeros(len(tokens) - start, dtype=torch.int64)
        plan = self.cache.plan([Segment(request_id, rows, None, NONE)])
        kv = kv_of(tokens, start, len(tokens))
        self.cache.append(plan, 0, kv, -kv)
        self.cache.commit(request_id, torch.arange(len(rows)))
        if self.featured:
            self.cache.store_features(request_id, start, kv[:, 0])
        self.cache.publish(request_id, tokens)

    def holds(self, request_id: int, tokens: list[int]) -> None:
        self.cache.check_integrity()
        if not self.cache.context_len(request_id):
            return
        keys, values = self.cache.contents(request_id, 0)
        want = kv_of(tokens, 0, len(keys))
        assert torch.equal(keys, want)
        assert torch.equal(values, -want)
        if self.featured:
            assert torch.equal(self.cache.features(request_id, 0, len(keys)), want[:, 0])

    def both(self, request_id: int, tokens: list[int]) -> int:
        found = self.begin(request_id, tokens)
        self.holds(request_id, tokens)
        self.run(request_id, tokens)
        self.holds(request_id, tokens)
        return found

    def blocks(self, request_id: int) -> list[int]:
        return self.cache._sequences[request_id].blocks


TEXT = list(range(1, 31))


@pytest.mark.parametrize("featured", [False, True])
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 3), (5, 4), (8, 7), (9, 8), (11, 8), (12, 11), (30, 12)])
def test_all_full_blocks_but_never_the_last_token(length: int, found: int, released: bool, featured: bool) -> None:
    shared = Shared(featured=featured)
    shared.both(0, TEXT[:13])
    if released:
        shared.cache.release(0)
    assert shared.both(1, TEXT[:length]) == found
    if not released:
        shared.holds(0, TEXT[:13])
    shared.holds(1, TEXT[:length])


def test_blocks_are_shared_and_not_copied() -> None:
    shared = Shared()
    shared.both(0, TEXT[:14])
    used = shared.cache.usage()["num_used"]
    assert shared.both(1, [*TEXT[:12], 99, 98]) == 12
    assert shared.blocks(1)[:3] == shared.blocks(0)[:3]
    usage = shared.cache.usage()
    assert (usage["num_used"], usage["num_shared"]) == (used + 1, 3)
    shared.holds(0, TEXT[:14])


def test_other_tokens_are_not_found_and_neither_are_the_same_elsewhere() -> None:
    shared = Shared()
    shared.both(0, TEXT[:16])
    assert shared.both(1, [9, *TEXT[1:16]]) == 0
    assert shared.both(2, TEXT[4:16]) == 0
    assert shared.both(3, [*TEXT[:6], 7, 7, *TEXT[8:16]]) == 4


def test_a_block_that_is_shared_in_part_is_copied_before_it_is_written() -> None:
    shared = Shared()
    shared.both(0, TEXT[:8])
    assert shared.begin(1, TEXT[:8]) == 7
    assert shared.blocks(1) == shared.blocks(0)
    shared.run(1, TEXT[:8])
    assert shared.blocks(1)[0] == shared.blocks(0)[0]
    assert shared.blocks(1)[1] != shared.blocks(0)[1]
    shared.run(1, [*TEXT[:8], 50, 51])
    shared.holds(0, TEXT[:8])
    shared.holds(1, [*TEXT[:8], 50, 51])


def test_going_back_into_a_published_block_copies_it_too() -> None:
    """What others may find is not written again, though nobody else holds it now."""
    shared = Shared()
    shared.both(0, TEXT[:8])
    shared.cache.restore(0, 6)
    shared.run(0, [*TEXT[:6], 70, 71, 72])
    shared.holds(0, [*TEXT[:6], 70, 71, 72])
    assert shared.both(1, TEXT[:9]) == 8
    shared.cache.release(0)
    shared.cache.release(1)
    assert shared.both(2, [*TEXT[:6], 70, 71, 72]) == 8


def test_without_a_block_for_the_copy_the_last_holder_writes_in_place() -> None:
    shared = Shared(max_blocks=2)
    shared.both(0, TEXT[:8])
    shared.cache.release(0)
    assert shared.both(1, TEXT[:8]) == 7
    shared.cache.release(1)
    assert shared.both(2, TEXT[:8]) == 7
    with pytest.raises(OutOfCacheError):
        shared.cache.reserve(2, 1)
    shared.holds(2, TEXT[:8])


def test_what_was_used_longest_ago_is_evicted_and_ends_of_prompts_before_their_beginnings() -> None:
    shared = Shared(max_blocks=6)
    first, second = TEXT[:8], [50, *TEXT[1:8]]
    for request_id, tokens in ((0, first), (1, second)):
        shared.both(request_id, tokens)
        shared.cache.release(request_id)
    assert shared.cache.usage()["num_cached"] == 4
    assert shared.begin(2, [*first, 1]) == 8  # now the second was used longest ago
    shared.cache.release(2)
    shared.both(3, list(range(60, 72)))  # two free blocks, and one of the second's: its end
    shared.cache.release(3)
    assert shared.begin(4, [*second, 1]) == 4
    shared.cache.release(4)
    assert shared.begin(5, [*first, 1]) == 8
    shared.cache.release(5)
    assert shared.cache.num_free_blocks == 6
    shared.both(6, list(range(100, 124)))
    assert shared.cache.usage()["num_cached"] == 0


def test_shared_blocks_are_never_evicted() -> None:
    shared = Shared(max_blocks=4)
    shared.both(0, TEXT[:8])
    assert shared.begin(1, [*TEXT[:8], 1]) == 8
    shared.cache.release(0)
    assert not shared.cache.has_room(9)
    assert shared.cache.has_room(8)
    shared.cache.open(2, 9)
    with pytest.raises(OutOfCacheError, match="9 more tokens asked, 2 of 4 blocks of 4 tokens in use"):
        shared.cache.reserve(2, 9)
    shared.holds(1, TEXT[:8])


def test_without_a_limit_what_nobody_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.kv.allocation.MOST_KEPT_BYTES", 5 * SIZE * 16)
    shared = Shared()
    for i in range(8):
        shared.both(i, [i, *TEXT[1:9]])
        shared.cache.release(i)
    usage = shared.cache.usage()
    assert usage["num_cached"] == 5
    assert usage["num_bytes"] < 20 * SIZE * 16
    assert shared.both(9, [7, *TEXT[1:9]]) == 8


def test_what_nobody_holds_can_be_forgotten() -> None:
    shared = Shared()
    for request_id, tokens in ((1, [*range(9)]), (2, [*range(20, 29)])):
        shared.begin(request_id, tokens)
        shared.run(request_id, tokens)
    shared.cache.release(1)
    shared.cache.forget_prefixes()
    assert shared.begin(3, [*range(9)]) == 0
    assert shared.begin(4, [*range(20, 29)]) == 8  # a running request's blocks stay
    shared.holds(2, [*range(20, 29)])


def test_off_by_default() -> None:
    cache = KVCache(block_tokens=SIZE)
    assert not cache.prefix_caching
    shared = Shared()
    shared.cache = cache
    shared.both(0, TEXT[:8])
    assert shared.both(1, TEXT[:8]) == 0
    cache.release(0)
    assert cache.usage()["num_cached"] == 0


class TestFeatures:
    """Hidden states beside the KV."""

    def test_a_block_without_them_is_not_found_by_who_needs_them(self) -> None:
        shared = Shared()
        shared.both(0, TEXT[:8])
        shared.featured = True
        shared.both(1, [50, *TEXT[1:8]])
        assert shared.both(2, TEXT[:9]) == 0
        shared.cache.release(0)
        assert shared.both(3, TEXT[:9]) == 8, "those of the second request with them are found now"

    def test_what_was_not_stored_is_an_error(self) -> None:
        shared = Shared(featured=True)
        shared.both(0, TEXT[:6])
        with pytest.raises(AssertionError, match="positions 6-8 of 6 committed"):
            shared.cache.store_features(0, 6, torch.zeros(2, 2))
        shared.featured = False
        shared.run(0, TEXT[:9])
        assert torch.equal(shared.cache.features(0, 2, 6), kv_of(TEXT, 2, 6)[:, 0])
        with pytest.raises(AssertionError, match="not stored"):
            shared.cache.features(0, 2, 7)

    def test_they_count_as_memory(self) -> None:
        shared = Shared(featured=True)
        assert shared.cache.bytes_per_token == 16
        shared.both(0, TEXT[:3])
        assert shared.cache.bytes_per_token == 24


class TestIndex:
    """Keys that are equal by accident."""

    def test_equal_keys_of_other_tokens_are_never_taken_for_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefix, "chain_key", lambda parent, token_ids: b"the same")
        index = PrefixIndex(2)
        assert index.add(ROOT, [1, 2], 0) == (b"the same", 0)
        assert index.add(ROOT, [3, 4], 1) is None
        assert index.add(b"the same", [5, 6], 2) is None
        assert index.find([3, 4]) == []
        assert index.find([1, 2, 5, 6]) == [(0, b"the same")]
        index.check_integrity()

    def test_a_cache_whose_keys_are_all_equal_is_only_slower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefix, "chain_key", lambda parent, token_ids: bytes([sum(token_ids) % 2]))
        shared = Shared()
        for i, first in enumerate((1, 2, 3, 4, 1, 2)):
            shared.both(i, [first, *TEXT[1:14]])

    def test_the_same_tokens_are_indexed_once(self) -> None:
        shared = Shared()
        for i in range(2):
            shared.begin(i, TEXT[:8])  # both before the other has computed anything
        for i in range(2):
            shared.run(i, TEXT[:8])
        assert len(shared.cache._allocation.index) == 2
        shared.cache.release(1)
        assert shared.cache.usage()["num_cached"] == 0, "the second one's blocks were known already"
        shared.cache.release(0)
        assert shared.cache.usage()["num_cached"] == 2

    def test_integrity_check_can_fail(self) -> None:
        shared = Shared()
        shared.both(0, TEXT[:8])
        shared.cache._allocation.index._blocks.clear()
        with pytest.raises(AssertionError, match="indexed twice"):
            shared.cache.check_integrity()
