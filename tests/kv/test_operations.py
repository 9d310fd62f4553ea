"""Whatever happens to a cache, what is committed equals a fresh prefill of the committed tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from specdec.errors import OutOfCacheError
from specdec.interfaces import Segment
from specdec.kv.cache import KVCache
from specdec.kv.storage import SlotStorage
from tests.decoding import assert_fresh_kv, private_runner
from tests.models.architectures import model_of, named

NONE = torch.tensor([], dtype=torch.int64)


class Sequence:
    """What a request should be: committed tokens, and the rows of its open reservation."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.reserved = 0
        self.rows: list[tuple[int, int]] = []  # (token, parent row or -1)

    def can_run(self) -> bool:
        return self.reserved > len(self.rows)

    def path_to(self, row: int) -> list[int]:
        path = []
        while row >= 0:
            path.append(row)
            row = self.rows[row][1]
        return path[::-1]


def features_of(tokens: list[int], start: int, stop: int) -> Tensor:
    """Return [stop - start, 2] rows that depend on all tokens up to each."""
    sums = [sum((i + 1) * (t + 1) for i, t in enumerate(tokens[: p + 1])) for p in range(start, stop)]
    return torch.tensor([sums, list(range(start, stop))], dtype=torch.float32).T


# Of two tokens, so that texts often begin alike.
token = st.sampled_from([1, 1, 1, 2])
texts = st.lists(token, min_size=1, max_size=14)


class Operations(RuleBasedStateMachine):
    """Any operations on one cache with several requests, and what they should have done. Hypothesis chooses."""

    counts: ClassVar[Counter[str]] = Counter()
    kv_dtype: ClassVar[str | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.sequences: dict[int, Sequence] = {}
        self.num_opened = 0

    def ids(self, wanted: Callable[[Sequence], bool] = lambda s: True) -> list[int]:
        return [i for i, s in self.sequences.items() if wanted(s)]

    def pick(self, data: Any, wanted: Callable[[Sequence], bool] = lambda s: True) -> tuple[int, Sequence]:
        request_id = data.draw(st.sampled_from(self.ids(wanted)), label="request")
        return request_id, self.sequences[request_id]

    def has_requests(self) -> bool:
        return bool(self.sequences)

    def has_room(self) -> bool:
        return bool(self.ids(Sequence.can_run))

    def has_rows(self) -> bool:
        return any(s.rows for s in self.sequences.values())

    @invariant()
    def contents_are_a_fresh_prefills(self) -> None:
        if not self.num_opened:
            return
        self.cache.check_integrity()
        for request_id, s in self.sequences.items():
            assert self.cache.context_len(request_id) == len(s.tokens)
            kept = self.cache._sequences[request_id]
            assert (kept.reserved, kept.used) == (s.reserved, len(s.rows))
            assert_fresh_kv(self.runner, request_id, s.tokens)
            if self.featured and s.tokens:
                got = self.cache.features(request_id, 0, len(s.tokens))
                assert torch.equal(got, features_of(s.tokens, 0, len(s.tokens)))
        limit = self.cache.num_blocks
        assert limit is None or self.cache.usage()["num_used"] <= limit

    @initialize(
        size=st.sampled_from([1, 2, 3, 16]),
        most=st.sampled_from([None, 12, 30]),
        shares=st.sampled_from([True, True, False]),
        featured=st.booleans(),
        tokens=st.lists(texts, min_size=1, max_size=3),
    )
    def begin(self, size: int, most: int | None, shares: bool, featured: bool, tokens: list[list[int]]) -> None:
        self.runner = private_runner(model_of(named("llama")), kv_block_tokens=size, kv_dtype=self.kv_dtype)
        self.cache = self.runner.cache
        self.cache.prefix_caching = self.shares = shares
        self.featured = featured and shares
        if most is not None:
            blocks = max(2, most // size)
            self.cache.max_bytes = blocks * size * (self.cache.bytes_per_token + 8 * self.featured)
        for text in tokens:
            self.open(text, 20)

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(tokens=texts, expected=st.integers(0, 40))
    def open(self, tokens: list[int], expected: int) -> None:
        self.num_opened += 1
        found = self.cache.open(self.num_opened, expected, tokens)
        assert found < len(tokens)
        assert self.shares or not found
        self.counts["found"] += found > 0
        self.counts["inside"] += found % self.cache.block_tokens > 0
        self.sequences[self.num_opened] = Sequence(tokens[:found])

    @precondition(has_requests)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        request_id, _ = self.pick(data)
        self.cache.release(request_id)
        self.cache.release(request_id)  # again changes nothing
        del self.sequences[request_id]

    def try_reserve(self, request_id: int, n: int) -> bool:
        """Reserve, or find that nothing has changed."""
        s, before = self.sequences[request_id], self.cache.usage()
        try:
            self.cache.reserve(request_id, n)
        except OutOfCacheError:
            more = -(-(len(s.tokens) + n) // self.cache.block_tokens) - len(self.cache._sequences[request_id].blocks)
            free = self.cache.num_free_blocks
            assert free is not None
            assert more + 1 > free, "there was room"
            assert self.cache.usage() == before
            self.counts["refused"] += 1
            return False
        s.reserved, s.rows = n, []
        self.counts["scattered"] += len(self.cache._sequences[request_id].runs) > 1
        return True

    @precondition(has_requests)
    @rule(data=st.data(), n=st.integers(0, 12))
    def reserve(self, data: Any, n: int) -> None:
        self.try_reserve(self.pick(data)[0], n)

    def segment(self, data: Any, request_id: int) -> Segment:
        """Return a drawn chain or tree for a reservation, on top of its earlier rows or beside them."""
        s = self.sequences[request_id]
        used = len(s.rows)
        ids = data.draw(st.lists(token, min_size=1, max_size=s.reserved - used), label="ids")
        tree = data.draw(st.booleans(), label="tree")
        if tree:
            parents = [st.integers(-1, used + i - 1) for i in range(len(ids))]
            above = list(data.draw(st.tuples(*parents), label="parents"))
        else:
            above = [used + i - 1 for i in range(len(ids))]
        s.rows += zip(ids, above, strict=True)
        self.counts["trees"] += tree
        return Segment(request_id, torch.tensor(ids), torch.tensor(above) if tree else None, NONE)

    @precondition(has_room)
    @rule(data=st.data())
    def forward(self, data: Any) -> None:
        """One packed forward of one to three requests."""
        able = st.sampled_from(self.ids(Sequence.can_run))
        chosen = data.draw(st.lists(able, min_size=1, max_size=3, unique=True), label="requests")
        self.runner.forward([self.segment(data, request_id) for request_id in chosen])
        self.counts["packed"] += len(chosen) > 1

    @precondition(has_rows)
    @rule(data=st.data())
    def rewind(self, data: Any) -> None:
        request_id, s = self.pick(data, lambda s: bool(s.rows))
        self.cache.rewind(request_id)
        s.rows = []

    @precondition(has_rows)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        self.keep_a_path(data, self.pick(data, lambda s: bool(s.rows))[0])

    def keep_a_path(self, data: Any, request_id: int) -> None:
        """Commit a drawn root path, and publish it; the one to row -1 is empty and rejects everything."""
        s = self.sequences[request_id]
        path = s.path_to(len(s.rows) - 1 - data.draw(st.integers(0, len(s.rows)), label="rows given up"))
        self.cache.commit(request_id, torch.tensor(path, dtype=torch.int64))
        self.counts["moved"] += path != list(range(len(path)))
        self.counts["rejected"] += len(path) < len(s.rows)
        known = len(s.tokens)
        s.tokens = s.tokens + [s.rows[row][0] for row in path]
        s.reserved, s.rows = 0, []
        if self.featured:
            self.cache.store_features(request_id, known, features_of(s.tokens, known, len(s.tokens)))
        if data.draw(st.sampled_from([True, True, False]), label="publish"):
            self.cache.publish(request_id, s.tokens)

    @precondition(has_requests)
    @rule(data=st.data(), most=st.integers(1, 12))
    def step(self, data: Any, most: int) -> None:
        """What an engine does: reserve, draft and rewind, one packed forward or two, keep a path each."""
        able = st.sampled_from(self.ids())
        chosen = data.draw(st.lists(able, min_size=1, max_size=4, unique=True), label="requests")
        chosen = [request_id for request_id in chosen if self.try_reserve(request_id, most)]
        if not chosen:
            return
        for request_id in chosen:
            if data.draw(st.booleans(), label="drafts"):
                self.runner.forward([self.segment(data, request_id)])
                self.cache.rewind(request_id)
                self.sequences[request_id].rows = []
        self.runner.forward([self.segment(data, request_id) for request_id in chosen])
        self.counts["packed"] += len(chosen) > 1
        more = [i for i in chosen if self.sequences[i].can_run()]
        if more and data.draw(st.booleans(), label="a second forward"):
            self.runner.forward([self.segment(data, request_id) for request_id in more])
            self.counts["continued"] += 1
        for request_id in chosen:
            self.keep_a_path(data, request_id)

    @precondition(has_requests)
    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        request_id, s = self.pick(data)
        s.tokens = s.tokens[: len(s.tokens) - data.draw(st.integers(0, len(s.tokens)), label="tokens given up")]
        self.cache.restore(request_id, len(s.tokens))
        s.reserved, s.rows = 0, []
        self.counts["restored"] += 1

    @precondition(has_requests)
    @rule(data=st.data())
    def preemption(self, data: Any) -> None:
        """A request gives up its blocks and comes back, or goes on as another one."""
        request_id, s = self.pick(data)
        self.cache.release(request_id)
        del self.sequences[request_id]
        self.open([*s.tokens, 1], len(s.tokens) + 8)

    @precondition(has_requests)
    @rule()
    def interruption(self) -> None:
        """Whatever the pool says, tables and index are what counts."""
        self.cache._allocation._unsettled = True


def run_operations(*, max_examples: int, shrink: bool = True, kv_dtype: str | None = None) -> Counter[str]:
    """Run drawn sequences of operations, the same ones every time, and return how often what happened."""

    class Counted(Operations):
        counts: ClassVar[Counter[str]] = Counter()

    Counted.kv_dtype = kv_dtype
    chosen = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )
    run_state_machine_as_test(Counted, settings=chosen)
    return Counted.counts


# Hits that end inside of a block are rare here; tests/kv/test_prefix.py makes them.
INTERESTING = ("trees", "packed", "moved", "rejected", "restored", "refused", "continued", "found", "scattered")


@pytest.mark.parametrize(("kv_dtype", "examples"), [(None, 150), ("int4", 30)])
def test_fault_08_contents_equal_a_fresh_prefill_after_any_operations(kv_dtype: str | None, examples: int) -> None:
    counts = run_operations(max_examples=examples, kv_dtype=kv_dtype)
    if kv_dtype is None:
        assert min(counts[name] for name in INTERESTING) >= 5, counts


@pytest.mark.parametrize(("owner", "broken"), [(KVCache, "_move"), (SlotStorage, "copy")], ids=["move", "copy"])
def test_a_cache_that_moves_nothing_is_found_out(owner: Any, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, broken, lambda *args: None)
    with pytest.raises(AssertionError, match="keys of layer"):
        run_operations(max_examples=120, shrink=False)
