"""A request that begins behind shared blocks is read as a view again after a few steps; what is shared stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.errors import OutOfCacheError
from specdec.interfaces import Segment
from specdec.kv.allocation import STEPS_IN_PIECES
from specdec.kv.blocks import BlockPool
from specdec.kv.cache import KVCache
from specdec.kv.storage import SlotStorage
from tests.decoding import add, assert_fresh_kv, drain, engine_of, private_runner, prompts
from tests.kv.flash_emulation import Emulated
from tests.kv.test_prefix import SIZE, TEXT, Shared
from tests.models.architectures import model_of, named


def runs(shared: Shared, request_id: int) -> int:
    return len(shared.cache._sequences[request_id].runs)


def hit(shared: Shared, steps: int, *, released: bool = False) -> list[int]:
    """Let request 1 begin as request 0 did and run so many steps of one token; return its tokens."""
    shared.both(0, TEXT[:13])
    if released:
        shared.cache.release(0)
        shared.both(7, [90] * 4)  # right behind what is kept
    tokens = [*TEXT[:12], 50]
    assert shared.both(1, tokens) == 12
    for i in range(steps - 1):
        tokens = [*tokens, 51 + i]
        shared.run(1, tokens)
        shared.holds(1, tokens)
    return tokens


@pytest.mark.parametrize("featured", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_after_a_few_steps_it_is_one_run(featured: bool, released: bool) -> None:
    shared = Shared(featured=featured)
    tokens = hit(shared, STEPS_IN_PIECES, released=released)
    assert runs(shared, 1) == (1 if released else 2), "what nobody else holds moves at once"
    tokens = [*tokens, 80]
    shared.run(1, tokens)
    assert runs(shared, 1) == 1
    assert shared.cache.usage()["runs_per_request"] == 1.0
    shared.holds(1, tokens)
    if not released:
        shared.holds(0, TEXT[:13])
        assert not set(shared.blocks(0)) & set(shared.blocks(1)), "a copy of its own"
    assert shared.both(2, [*TEXT[:12], 60]) == 12, "the next one finds what it found"
    assert shared.blocks(2)[:3] == shared.blocks(1 if released else 0)[:3]
    usage = shared.cache.usage()
    assert usage["num_shared"] == 3
    assert usage["num_cached"] == 0, "nothing is kept twice"


def test_what_it_publishes_afterwards_is_found() -> None:
    shared = Shared()
    tokens = hit(shared, STEPS_IN_PIECES + 5)
    assert runs(shared, 1) == 1
    assert shared.both(2, [*tokens, 1]) == len(tokens) // SIZE * SIZE
    shared.cache.release(0)
    shared.cache.release(1)
    assert shared.both(3, [*tokens, 2]) == len(tokens) // SIZE * SIZE


def test_going_back_behind_its_beginning_changes_nobody_elses() -> None:
    shared = Shared()
    tokens = hit(shared, STEPS_IN_PIECES + 1)
    assert runs(shared, 1) == 1
    shared.cache.restore(1, 6)
    other = [*TEXT[:6], 30, 31, 32, 33, 34, 35]
    shared.run(1, other)
    shared.holds(1, other)
    shared.holds(0, TEXT[:13])
    assert shared.both(2, tokens[:13]) == 12
    assert shared.both(3, [*other, 1]) == 12


@pytest.mark.parametrize(("blocks", "gathered"), [(24, True), (14, False)])
def test_only_where_half_of_the_memory_stays_free(blocks: int, gathered: bool) -> None:
    shared = Shared(max_blocks=blocks)
    tokens = hit(shared, 3 * STEPS_IN_PIECES)
    assert runs(shared, 1) == (1 if gathered else 2)
    assert shared.cache.usage()["num_cached"] == 0
    shared.holds(1, tokens)


def test_nothing_is_evicted_for_it() -> None:
    shared = Shared(max_blocks=24)
    for i in range(4):
        shared.both(10 + i, [100 + i] * 12)
        shared.cache.release(10 + i)
    hit(shared, 3 * STEPS_IN_PIECES)
    assert runs(shared, 1) == 2
    assert shared.cache.usage()["num_cached"] == 12


def test_no_memory_for_it_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared()
    tokens = hit(shared, STEPS_IN_PIECES)

    def full(*args: Any) -> None:
        raise OutOfCacheError("no memory for a KV cache")

    with monkeypatch.context() as patch:
        patch.setattr(SlotStorage, "copy", full)
        shared.run(1, [*tokens, 80])
    assert runs(shared, 1) == 2
    shared.holds(1, [*tokens, 80])
    shared.holds(0, TEXT[:13])


def test_a_kernel_that_reads_pages_needs_none() -> None:
    cache = KVCache(block_tokens=256, prefix_caching=True, backend=Emulated())
    tokens = list(range(600))
    for request_id in range(2):
        known = cache.open(request_id, 600, tokens)
        for n in (600 - known, *[1] * 8):
            cache.reserve(request_id, n)
            plan = cache.plan([Segment(request_id, torch.zeros(n, dtype=torch.int64), None, torch.arange(0))])
            cache.append(plan, 0, *(torch.zeros(n, 1, 8) for _ in range(2)))
            cache.commit(request_id, torch.arange(n))
        cache.publish(request_id, [*tokens, *[1] * 8])
    assert len(cache._sequences[1].runs) == 2


@pytest.mark.parametrize(
    ("drafter", "options", "kv_dtype"),
    [
        ("none", {}, None),
        ("scripted", {"accept_counts": [0, 2, 4, 1]}, None),
        ("scripted", {"accept_counts": [0, 2, 4, 1]}, "int8"),
    ],
)
def test_the_ids_are_the_same(drafter: str, options: dict[str, Any], kv_dtype: str | None) -> None:
    model = model_of(named("llama"))
    runner = private_runner(model, kv_dtype=kv_dtype)
    runner.cache.prefix_caching = True
    engine = engine_of(model, drafter, options, runner=runner)
    (shared,) = prompts(40)
    rows = [[*shared, 3], [*shared, 9, 4], [*shared[:33], 8]]
    plain = engine_of(model, runner=private_runner(model, kv_dtype=kv_dtype))
    expected = [add(plain, row, 20) for row in rows]
    drain(plain)
    requests = [add(engine, rows[0], 20)]
    engine.step()
    requests += [add(engine, row, 20) for row in rows[1:]]
    seen: dict[int, list[int]] = {r.request_id: [] for r in requests}
    while engine.has_unfinished:
        engine.step()
        runner.cache.check_integrity()
        for request in requests:
            table = runner.cache._sequences.get(request.request_id)
            if table is not None:
                seen[request.request_id].append(len(table.runs))
                if len(seen[request.request_id]) == STEPS_IN_PIECES + 1:
                    assert_fresh_kv(runner, request.request_id, request.tokens)
    assert [r.new_tokens for r in requests] == [r.new_tokens for r in expected]
    assert [r.stats.num_cached_tokens for r in requests] == [0, 32, 32]
    for request in requests[1:]:
        runs_of = seen[request.request_id]
        assert runs_of[0] == 2
        assert set(runs_of[STEPS_IN_PIECES:]) == {1}, runs_of


def test_without_a_limit_copies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests behind one long prompt would otherwise hold it as many times."""
    shared = Shared()
    shared.both(0, TEXT[:13])
    block_bytes = shared.cache._allocation.storage.bytes_per_slot * SIZE
    monkeypatch.setattr("specdec.kv.allocation.MOST_KEPT_BYTES", 10 * block_bytes)  # two copies of five blocks at most
    texts = {request: [*TEXT[:12], 40 + request] for request in range(1, 6)}
    for step in range(STEPS_IN_PIECES + 3):
        for request, tokens in texts.items():
            if step == 0:
                assert shared.both(request, tokens) == 12
            else:
                tokens.append(50 + step)
                shared.run(request, tokens)
    assert sum(runs(shared, request) == 1 for request in texts) == 2
    for request, tokens in texts.items():
        shared.holds(request, tokens)


def test_a_request_that_cannot_move_keeps_what_is_set_aside_for_it() -> None:
    pool = BlockPool(max_blocks=8)
    assert pool.claim(1, 3)
    assert pool.claim(2, 2)
    assert not pool.claim(1, 6, whole=True)
    assert pool.num_claimed(1) == 3
    assert pool.claim(1, 3, whole=True)
    assert pool.num_claimed(1) == 3
    assert pool.claim(3, 3, whole=True), "what was set aside before is free again"
