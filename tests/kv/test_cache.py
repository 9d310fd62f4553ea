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
from tests.decoding import add, assert_fresh_kv, drain, engine_of, private_runner
from tests.models.architectures import model_of, named

NONE = torch.tensor([], dtype=torch.int64)


class Sequence:
    """What a request should be: committed tokens, and the rows of its open reservation."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.reserved = 0
        self.rows: list[tuple[int, int]] = []  # (token, parent row or -1)

    def can_run(self) -> bool:
        return self.reserved > len(self.rows)

    def is_not_full(self) -> bool:
        return len(self.tokens) < self.max_tokens

    def path_to(self, row: int) -> list[int]:
        path = []
        while row >= 0:
            path.append(row)
            row = self.rows[row][1]
        return path[::-1]


class Operations(RuleBasedStateMachine):
    """Any operations on one cache with several requests, and what they should have done. Hypothesis chooses."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.runner = private_runner(model_of(named("llama")))
        self.cache = self.runner.cache
        self.sequences: dict[int, Sequence] = {}

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
        self.cache.check_integrity()
        for request_id, s in self.sequences.items():
            assert self.cache.context_len(request_id) == len(s.tokens)
            assert self.cache.room(request_id) == s.max_tokens - len(s.tokens)
            kept = self.cache._sequences[request_id]
            assert (kept.reserved, kept.used) == (s.reserved, len(s.rows))
            assert_fresh_kv(self.runner, request_id, s.tokens)

    @initialize(lengths=st.lists(st.integers(8, 40), min_size=1, max_size=3))
    def begin(self, lengths: list[int]) -> None:
        for max_tokens in lengths:
            self.open(max_tokens)

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(max_tokens=st.integers(1, 40))
    def open(self, max_tokens: int) -> None:
        request_id = max(self.sequences, default=0) + 1
        self.cache.open(request_id, max_tokens)
        self.sequences[request_id] = Sequence(max_tokens)

    @precondition(has_requests)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        request_id, _ = self.pick(data)
        self.cache.release(request_id)
        self.cache.release(request_id)  # again changes nothing
        del self.sequences[request_id]

    @precondition(has_requests)
    @rule(data=st.data(), n=st.integers(0, 12))
    def reserve(self, data: Any, n: int) -> None:
        request_id, s = self.pick(data)
        if len(s.tokens) + n > s.max_tokens:
            with pytest.raises(OutOfCacheError, match=f"holds {len(s.tokens)} tokens of {s.max_tokens}"):
                self.cache.reserve(request_id, n)
            self.counts["refused"] += 1
            return
        self.cache.reserve(request_id, n)
        s.reserved, s.rows = n, []

    def segment(self, data: Any, request_id: int) -> Segment:
        """Return a drawn chain or tree for a reservation, on top of its earlier rows or beside them."""
        s = self.sequences[request_id]
        used = len(s.rows)
        ids = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=s.reserved - used), label="ids")
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
        """Commit a drawn root path; the one to row -1 is empty and rejects everything."""
        s = self.sequences[request_id]
        path = s.path_to(data.draw(st.integers(-1, len(s.rows) - 1), label="last kept row"))
        self.cache.commit(request_id, torch.tensor(path, dtype=torch.int64))
        self.counts["moved"] += path != list(range(len(path)))
        self.counts["rejected"] += len(path) < len(s.rows)
        s.tokens += [s.rows[row][0] for row in path]
        s.reserved, s.rows = 0, []

    def not_full(self) -> bool:
        return any(s.is_not_full() for s in self.sequences.values())

    @precondition(not_full)
    @rule(data=st.data(), most=st.integers(1, 12))
    def step(self, data: Any, most: int) -> None:
        """What an engine does: reserve, draft and rewind, one packed forward or two, keep a path each."""
        able = st.sampled_from(self.ids(Sequence.is_not_full))
        chosen = data.draw(st.lists(able, min_size=1, max_size=4, unique=True), label="requests")
        for request_id in chosen:
            s = self.sequences[request_id]
            s.reserved, s.rows = min(most, s.max_tokens - len(s.tokens)), []
            self.cache.reserve(request_id, s.reserved)
            if data.draw(st.booleans(), label="drafts"):
                self.runner.forward([self.segment(data, request_id)])
                self.cache.rewind(request_id)
                s.rows = []
        self.runner.forward([self.segment(data, request_id) for request_id in chosen])
        self.counts["packed"] += len(chosen) > 1
        more = [i for i in chosen if self.sequences[i].can_run()]
        if more and data.draw(st.booleans(), label="a second forward"):
            self.runner.forward([self.segment(data, request_id) for request_id in more])
            self.counts["continued"] += 1
        for request_id in chosen:
            self.keep_a_path(data, request_id)

    @precondition(has_requests)
    @rule(data=st.data(), more=st.integers(0, 20))
    def extend(self, data: Any, more: int) -> None:
        request_id, s = self.pick(data)
        s.max_tokens += more
        self.cache.extend(request_id, s.max_tokens)
        s.reserved, s.rows = 0, []
        self.counts["extended"] += bool(s.tokens)

    @precondition(has_requests)
    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        request_id, s = self.pick(data)
        del s.tokens[data.draw(st.integers(0, len(s.tokens)), label="context_len") :]
        self.cache.restore(request_id, len(s.tokens))
        s.reserved, s.rows = 0, []
        self.counts["restored"] += 1


def run_operations(*, max_examples: int, shrink: bool = True) -> Counter[str]:
    """Run drawn sequences of operations, the same ones every time, and return how often what happened."""

    class Counted(Operations):
        counts: ClassVar[Counter[str]] = Counter()

    chosen = settings(
        max_examples=max_examples,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )
    run_state_machine_as_test(Counted, settings=chosen)
    return Counted.counts


def test_fault_08_contents_equal_a_fresh_prefill_after_any_operations() -> None:
    counts = run_operations(max_examples=250)
    interesting = ("trees", "packed", "moved", "rejected", "restored", "extended", "refused", "continued")
    assert min(counts[name] for name in interesting) >= 50, counts


@pytest.mark.parametrize("broken", ["_move", "_copy"])
def test_a_cache_that_moves_nothing_is_found_out(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, broken, lambda *args: None)
    with pytest.raises(AssertionError, match="keys of layer"):
        run_operations(max_examples=250, shrink=False)


class HeldDown:
    """A cache with two requests, filled by hand: request 0 with `context` tokens, request 1 beside it."""

    def __init__(self, context: int = 3, layers: int = 2, heads: int = 2, key: int = 4, value: int = 4) -> None:
        self.cache = KVCache()
        self.generator = torch.Generator().manual_seed(0)
        self.layers, self.heads, self.key, self.value = layers, heads, key, value
        self.cache.open(0, 16)
        self.cache.open(1, 4)
        self.fill(0, context)
        self.cache.commit(0, torch.arange(context))

    def fill(self, request_id: int, rows: int, parents: list[int] | None = None) -> None:
        self.cache.reserve(request_id, rows)
        tree = None if parents is None else torch.tensor(parents)
        plan = self.cache.plan([Segment(request_id, torch.zeros(rows, dtype=torch.int64), tree, NONE)])
        for layer in range(self.layers):
            q, k = (torch.randn(rows, self.heads, self.key, generator=self.generator) for _ in range(2))
            v = torch.randn(rows, self.heads, self.value, generator=self.generator)
            self.cache.attend(plan, layer, q, k, v)

    def contents(self, request_id: int) -> list[Tensor]:
        return [t for layer in range(self.layers) for t in self.cache.contents(request_id, layer)]


def no_move(*args: Any) -> None:
    raise AssertionError("rows were moved")


@pytest.mark.parametrize("kept", [[], [0], [0, 1, 2], [0, 1, 2, 3, 4]], ids=str)
def test_a_chain_commit_moves_nothing(kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldDown()
    held.fill(0, 5)
    monkeypatch.setattr(KVCache, "_move", no_move)
    stores = [*held.cache._keys.values(), *held.cache._values.values()]
    before = [(t.data_ptr(), t._version, t.clone()) for t in stores]
    held.cache.commit(0, torch.tensor(kept, dtype=torch.int64))
    assert held.cache.context_len(0) == 3 + len(kept)
    for tensor, (pointer, version, copy) in zip(stores, before, strict=True):
        assert (tensor.data_ptr(), tensor._version) == (pointer, version)
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())


def test_the_leftmost_path_of_a_tree_moves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldDown()
    held.fill(0, 4, parents=[-1, 0, 1, 0])
    monkeypatch.setattr(KVCache, "_move", no_move)
    held.cache.commit(0, torch.tensor([0, 1, 2]))


def test_chains_end_to_end_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "_move", no_move)
    engine = engine_of(model_of(named("llama")), "scripted", {"accept_counts": [0, 2, 4]})
    requests = [add(engine, [5, 6, 7], 20), add(engine, [9], 12)]
    drain(engine)
    assert [len(r.new_tokens) for r in requests] == [20, 12]


def test_a_kept_path_is_gathered_and_the_neighbour_is_untouched() -> None:
    held = HeldDown()
    held.fill(1, 2)
    held.cache.commit(1, torch.arange(2))
    neighbour, earlier = held.contents(1), held.contents(0)
    held.fill(0, 5, parents=[-1, 0, 0, 1, 2])
    base = held.cache._sequences[0].start + 3
    rows = [t[base : base + 5].clone() for t in held.cache._keys.values()]
    held.cache.commit(0, torch.tensor([0, 2, 4]))
    for layer, written in enumerate(rows):
        keys, _ = held.cache.contents(0, layer)
        assert torch.equal(keys[3:], written[[0, 2, 4]])
    assert all(torch.equal(t[:3], old) for t, old in zip(held.contents(0), earlier, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held.contents(1), neighbour, strict=True))


@pytest.mark.parametrize("kept", [[1, 0], [0, 0], [5], [-1], [0, 5]], ids=str)
def test_a_commit_of_rows_that_are_not_there_is_an_error(kept: list[int]) -> None:
    held = HeldDown()
    held.fill(0, 5)
    with pytest.raises(AssertionError, match="kept"):
        held.cache.commit(0, torch.tensor(kept))


def test_more_rows_than_reserved_are_an_error() -> None:
    held = HeldDown()
    held.cache.reserve(0, 2)
    with pytest.raises(AssertionError, match="3 rows do not fit a reservation of 2"):
        held.cache.plan([Segment(0, torch.zeros(3, dtype=torch.int64), None, NONE)])


class TestOutOfCache:
    """Errors that leave everything as it was."""

    def state(self, held: HeldDown) -> tuple[Any, ...]:
        pool = held.cache._pool
        sequences = [
            (i, s.start, s.max_tokens, s.context_len, s.reserved, s.used) for i, s in held.cache._sequences.items()
        ]
        return pool.capacity, dict(pool._used), list(pool._free), sequences

    def test_open(self) -> None:
        held = HeldDown()
        held.cache.max_bytes = 25 * held.cache.bytes_per_token
        before = self.state(held)
        with pytest.raises(OutOfCacheError, match="6 more tokens asked, 20 of 25 in use"):
            held.cache.open(2, 6)
        assert self.state(held) == before
        held.cache.open(2, 5)

    def test_reserve_keeps_the_open_reservation(self) -> None:
        held = HeldDown()
        held.fill(0, 5)
        before = self.state(held)
        with pytest.raises(OutOfCacheError, match="holds 3 tokens of 16 and cannot take 14 more"):
            held.cache.reserve(0, 14)
        assert self.state(held) == before
        held.cache.commit(0, torch.arange(5))

    def test_extend(self) -> None:
        held = HeldDown()
        held.cache.max_bytes = 30 * held.cache.bytes_per_token
        before, kept = self.state(held), held.contents(0)
        with pytest.raises(OutOfCacheError):
            held.cache.extend(0, 17)
        assert self.state(held) == before
        assert all(torch.equal(a, b) for a, b in zip(held.contents(0), kept, strict=True))

    def test_extend_without_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held = HeldDown()
        before, kept = self.state(held), held.contents(0)

        def no_memory(*args: Any, **kwargs: Any) -> Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", no_memory)
            with pytest.raises(OutOfCacheError, match="no memory for a KV cache of"):
                held.cache.extend(0, 1000)
        assert self.state(held) == before
        held.cache.check_integrity()
        assert all(torch.equal(a, b) for a, b in zip(held.contents(0), kept, strict=True))
        held.cache.extend(0, 40)
        assert all(torch.equal(a, b) for a, b in zip(held.contents(0), kept, strict=True))

    def test_check_fits_names_both_numbers(self) -> None:
        held = HeldDown()
        held.cache.max_bytes = 25 * held.cache.bytes_per_token
        held.cache.check_fits(25)
        with pytest.raises(OutOfCacheError, match=r"26 tokens \(\d+ bytes\) and the limit of \d+ bytes holds 25"):
            held.cache.check_fits(26)


def test_restore_goes_back_only() -> None:
    held = HeldDown()
    with pytest.raises(AssertionError, match="forwards"):
        held.cache.restore(0, 4)
    held.fill(0, 5)
    held.cache.commit(0, torch.arange(5))
    held.cache.restore(0, 3)
    assert held.cache.context_len(0) == 3
    assert held.cache.room(0) == 13


def test_integrity_check_can_fail() -> None:
    held = HeldDown()
    del held.cache._sequences[1]
    with pytest.raises(AssertionError, match="slots leak"):
        held.cache.check_integrity()


@pytest.mark.parametrize(("name", "width"), [("llama", 8 + 8), ("qwen3", 12 + 12), ("deepseek_v3", 16 + 12)])
def test_bytes_per_token(name: str, width: int) -> None:
    """Two layers; keys and values may have different widths."""
    model = model_of(named(name))
    heads = model.config.num_key_value_heads
    assert KVCache().bytes_per_token == 0  # nothing seen yet
    for runner in (engine_of(model).target, private_runner(model)):  # the second has not run anything
        assert runner.cache.bytes_per_token == 2 * heads * width * 8
