"""What a cache filled by hand moves, keeps and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import OutOfCacheError
from specdec.interfaces import Segment
from specdec.kv.cache import KVCache
from specdec.kv.storage import SlotStorage, is_out_of_memory
from tests.decoding import add, drain, engine_of, private_runner
from tests.models.architectures import model_of, named

NONE = torch.tensor([], dtype=torch.int64)


class HeldDown:
    """A cache with two requests, filled by hand: request 0 with `context` tokens, request 1 beside it."""

    def __init__(self, context: int = 3, layers: int = 2, heads: int = 2, key: int = 4, value: int = 4) -> None:
        self.cache = KVCache(block_tokens=4)
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
    stores = held.cache._storage._all()
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
    engine = engine_of(model_of(named("llama")), "scripted", {"accept_counts": [0, 2, 4]})
    monkeypatch.setattr(KVCache, "_move", no_move)  # only now: a model is compared over trees before it is used
    requests = [add(engine, [5, 6, 7], 20), add(engine, [9], 12)]
    drain(engine)
    assert [len(r.new_tokens) for r in requests] == [20, 12]


def test_a_kept_path_is_gathered_and_the_neighbour_is_untouched() -> None:
    held = HeldDown()
    held.fill(1, 2)
    held.cache.commit(1, torch.arange(2))
    neighbour, earlier = held.contents(1), held.contents(0)
    held.fill(0, 5, parents=[-1, 0, 0, 1, 2])
    (where,) = held.cache._sequences[0].slices(3, 8)
    rows = [held.cache._storage.parts[layer][0][where].clone() for layer in held.cache.layers]
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
        tables = [(i, list(t.blocks), t.context_len, t.reserved, t.used) for i, t in held.cache._sequences.items()]
        return held.cache.usage(), tables

    def limited(self, blocks: int) -> HeldDown:
        held = HeldDown()
        held.cache.max_bytes = 4 * blocks * held.cache.bytes_per_token
        return held

    def test_a_hint_is_never_refused_and_takes_nothing(self) -> None:
        held = self.limited(3)
        held.cache.open(2, 10**6)
        assert held.cache.usage()["num_used"] == 1
        assert held.cache.num_free_blocks == 2
        held.fill(1, 8)
        with pytest.raises(OutOfCacheError, match="1 more tokens asked, 3 of 3 blocks of 4 tokens in use"):
            held.cache.reserve(2, 1)
        assert not held.cache.has_room(1)
        held.cache.check_integrity()

    def test_reserve_keeps_the_open_reservation(self) -> None:
        held = self.limited(4)
        held.fill(0, 5)
        before = self.state(held)
        with pytest.raises(OutOfCacheError, match="14 more tokens asked"):
            held.cache.reserve(0, 14)
        assert self.state(held) == before
        held.cache.commit(0, torch.arange(5))

    @pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), KeyboardInterrupt()])
    def test_without_memory_for_more(self, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
        held = HeldDown()
        before, kept = self.state(held), held.contents(0)

        def fail(*args: Any, **kwargs: Any) -> Tensor:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", fail)
            with pytest.raises((OutOfCacheError, KeyboardInterrupt), match=r"no memory for a KV cache of|^$"):
                held.cache.reserve(0, 1000)
        assert self.state(held) == before
        held.cache.check_integrity()
        assert all(torch.equal(a, b) for a, b in zip(held.contents(0), kept, strict=True))
        held.cache.reserve(0, 40)
        assert all(torch.equal(a, b) for a, b in zip(held.contents(0), kept, strict=True))

    @pytest.mark.parametrize(
        ("error", "memory"),
        [
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
            (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: not enough memory"), True),
            (MemoryError(), True),
            (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
            (RuntimeError("Expected all tensors to be on the same device"), False),
            (ValueError("not enough memory"), False),
        ],
        ids=repr,
    )
    def test_only_want_of_memory_is_called_so(
        self, error: Exception, memory: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert is_out_of_memory(error) is memory
        held = HeldDown()
        before = self.state(held)

        def fail(*args: Any, **kwargs: Any) -> Tensor:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", fail)
            with pytest.raises(OutOfCacheError if memory else type(error)) as raised:
                held.cache.reserve(0, 1000)
        assert isinstance(raised.value, OutOfCacheError) is memory
        assert self.state(held) == before

    def test_check_fits_names_both_numbers(self) -> None:
        held = HeldDown()
        held.cache.max_bytes = 27 * held.cache.bytes_per_token
        held.cache.check_fits(24)
        said = r"25 tokens \(\d+ bytes\) and the limit of \d+ bytes holds 24, in blocks of 4; raise"
        with pytest.raises(OutOfCacheError, match=said):
            held.cache.check_fits(25)


def test_what_nobody_asked_for_is_not_copied_as_tensors_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SlotStorage()
    storage.grow(10, None)
    (part,) = storage.add(0, [torch.zeros(1, 2)])
    storage.grow(12, None)  # makes 20
    storage.parts[0][0].fill_(7.0)
    assert part.shape[0] == 10
    monkeypatch.setattr(torch, "empty", torch.zeros)
    storage.grow(21, None)
    assert storage.parts[0][0].shape[0] == 40
    assert storage.parts[0][0][:, 0].tolist() == [7.0] * 12 + [0.0] * 28


def test_restore_goes_back_only() -> None:
    held = HeldDown()
    with pytest.raises(AssertionError, match="forwards"):
        held.cache.restore(0, 4)
    held.fill(0, 5)
    held.cache.commit(0, torch.arange(5))
    held.cache.restore(0, 3)
    assert held.cache.context_len(0) == 3


def test_integrity_check_can_fail() -> None:
    held = HeldDown()
    del held.cache._sequences[0]
    with pytest.raises(AssertionError, match="blocks leak"):
        held.cache.check_integrity()


@pytest.mark.parametrize(("name", "width"), [("llama", 8 + 8), ("qwen3", 12 + 12), ("deepseek_v3", 16 + 12)])
def test_bytes_per_token(name: str, width: int) -> None:
    """Two layers; keys and values may have different widths."""
    model = model_of(named(name))
    heads = model.config.num_key_value_heads
    assert KVCache().bytes_per_token == 0  # nothing seen yet
    for runner in (engine_of(model).target, private_runner(model)):  # the second has not run anything
        assert runner.cache.bytes_per_token == 2 * heads * width * 8
