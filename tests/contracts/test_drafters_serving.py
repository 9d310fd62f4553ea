"""What every registered drafter keeps while requests share prefixes and are preempted."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.build import build_drafter, build_engine, build_verifiers
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.interfaces import SamplingParams
from specdec.models.build import RunnerConfig, build_runner
from tests.contracts.test_drafters import CASES, model_for
from tests.decoding import add, assert_fresh_kv, drain, looking_ahead, prompts, reference
from tests.models.architectures import model_of, named

each = pytest.mark.parametrize(("name", "options"), CASES)
# They learn from all requests, so that a second one is drafted otherwise than a first one, whatever is cached.
REMEMBER = ("token_recycling", "suffix")


def engine(name: str, options: dict[str, Any], *, tokens: int | None = None, **config: Any) -> Engine:
    """Return an engine with a new cache, of `tokens` tokens at most."""
    model = model_of(named("llama"))
    runner = build_runner(model, RunnerConfig()).with_own_cache()
    if tokens is not None:
        runner.cache.max_bytes = tokens * runner.cache.bytes_per_token
    engine_config = EngineConfig(**{"max_draft_tokens": 4, **config})
    runner.cache.prefix_caching = engine_config.prefix_caching
    if "model" in options:
        options = {**options, "model": model_for(name, runner)}
    drafter = build_drafter(name, runner, None, options)
    return looking_ahead(Engine(runner, drafter, build_verifiers("auto"), engine_config))


@each
def test_fault_17_acceptance_behind_a_cached_prefix_is_that_of_a_cold_run(name: str, options: dict[str, Any]) -> None:
    shared, one, two = prompts(40, 5, 9)
    first = shared + one
    first_said = reference(model_of(named("llama")), first, 12)
    texts = [first, shared + two, shared[:32] + one, first + first_said[:3]]  # the last ends with a block that is known
    warm = engine(name, options, prefix_caching=True, prefill_chunk_tokens=16)
    drain_one = [add(warm, texts[0], 12)]
    drain(warm)
    later = [add(warm, text, 12) for text in texts[1:]]
    drain(warm)
    assert [r.stats.num_cached_tokens for r in drain_one] == [0]
    assert [r.stats.num_cached_tokens for r in later] == [32, 32, 47]
    for request, text in zip(later, texts[1:], strict=True):
        assert request.new_tokens == reference(model_of(named("llama")), text, 12)
        cold_engine = engine(name, options, prefill_chunk_tokens=16)
        cold = add(cold_engine, text, 12)
        drain(cold_engine)
        if name not in REMEMBER and name not in ("random", "scripted", "oracle", "adversary"):  # dice by request
            assert request.stats.accepted_at == cold.stats.accepted_at
            assert request.stats.num_steps == cold.stats.num_steps
    warm.target.cache.check_integrity()
    assert warm.target.cache.usage()["num_used"] == 0


@each
def test_fault_19_preempted_in_the_middle_of_speculation(name: str, options: dict[str, Any]) -> None:
    small = engine(name, options, tokens=80, prefill_chunk_tokens=3, max_batch_size=8)
    rows = prompts(20, 9, 17, 3, 26)
    requests = [add(small, row, 30) for row in rows]
    for _ in range(3000):
        if not small.has_unfinished:
            break
        small.step()
        small.target.cache.check_integrity()
    assert small.stats.num_preemptions > 0
    assert sum(r.stats.num_preemptions for r in requests) == small.stats.num_preemptions
    for request, row in zip(requests, rows, strict=True):
        assert request.new_tokens == reference(model_of(named("llama")), row, 30)
        request.stats.check()
        assert request.stats.num_emitted_tokens == 29, "all but prefill's, preempted or not"
    assert small.target.cache.usage()["num_used"] == 0


def test_preempted_samples_as_if_nothing_had_been() -> None:
    sampling = SamplingParams(temperature=1.0, seed=7)
    rows = prompts(20, 9, 17, 3)
    said = []
    for tokens in (64, None):
        some = engine("none", {}, tokens=tokens, prefix_caching=True)
        requests = [add(some, row, 40, sampling=sampling) for row in rows]
        drain(some, 2000)
        said.append([r.new_tokens for r in requests])
        assert (some.stats.num_preemptions > 0) == (tokens is not None)
    assert said[0] == said[1]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    some = engine("none", {}, tokens=1000, prefix_caching=True)
    request = add(some, prompts(30)[0], 40)
    for _ in range(10):
        some.step()
    some.residency.preempt(request)
    assert request.num_computed == 0
    some.step()
    assert some.stats.num_cached_tokens >= 32
    drain(some)
    assert request.new_tokens == reference(model_of(named("llama")), prompts(30)[0], 40)
    assert request.stats.num_cached_tokens == 0, "of its prompt, nothing was found when it came"


def test_kv_of_a_preempted_request_is_fresh() -> None:
    some = engine("ngram", {}, tokens=1000)
    request = add(some, prompts(30)[0], 40)
    for _ in range(10):
        some.step()
    some.residency.preempt(request)
    for _ in range(3):
        some.step()
        assert_fresh_kv(some.target, request.request_id, request.tokens)


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_target_and_drafter_share_one_memory_limit(name: str) -> None:
    model = model_of(named("llama"))
    runner = build_runner(model, RunnerConfig()).with_own_cache()
    runner.cache.max_bytes = limit = 200 * runner.cache.bytes_per_token
    options = {"model": model_for(name, runner)}
    some = build_engine(runner, name, build_verifiers("auto"), EngineConfig(), drafter_options=options)
    own = some.drafter.own_cache  # type: ignore[attr-defined]
    assert runner.cache.max_bytes + own.max_bytes == limit
    assert abs(runner.cache.max_tokens - own.max_tokens) <= runner.cache.block_tokens
    rows = prompts(20, 9, 17, 3, 26)
    requests = [add(some, row, 30) for row in rows]
    drain(some, 2000)
    assert [r.new_tokens for r in requests] == [reference(model, row, 30) for row in rows]
    assert own.num_bytes <= own.max_bytes
    assert own.usage()["num_used"] == 0


def test_no_more_are_admitted_than_there_is_memory_for() -> None:
    """Opening takes no memory, so what running requests will take counts before a further one is let in."""
    some = looking_ahead(engine("none", {}, tokens=160, max_batch_size=16), 32)
    requests = [add(some, row, 4) for row in prompts(*[30] * 12)]
    some.step()
    assert some.num_running == 3, "of three blocks each, which ten blocks hold three times"
    drain(some, 2000)
    assert some.stats.num_preemptions == 0
    assert all(r.num_new_tokens == 4 for r in requests)
