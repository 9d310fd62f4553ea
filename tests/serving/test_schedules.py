"""Whatever is scheduled with whatever, every request gets what it would get alone, and no block leaks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.engine import Engine
from specdec.interfaces import SamplingParams
from specdec.request import Request, StopRules
from tests.decoding import add, drain, engine_of, private_runner, prompts
from tests.heads.tiny_heads import tiny_eagle
from tests.models.architectures import model_of, named

SHARED = prompts(48, seed=1)[0]  # what prompts begin with
TAILS = prompts(*range(1, 13), seed=2)
MOST_TOKENS = 48 + 12 + 14
DRAFTERS = ("none", "ngram", "suffix", "random", "draft_model", "early_exit", "eagle")
PER_SCHEDULE = 14  # requests


@dataclass(frozen=True)
class Plan:
    """One request of a schedule."""

    gap: int  # steps after the one before it
    num_shared: int
    tail: int
    max_new_tokens: int
    seed: int | None  # None: greedy
    priority: int
    draft: bool
    abort_after: int | None  # steps

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*SHARED[: self.num_shared], *TAILS[self.tail])


@dataclass(frozen=True)
class Setting:
    """An engine and the steps that fail in it."""

    max_batch_size: int
    prefill_chunk_tokens: int
    max_step_tokens: int | None
    spare_tokens: int  # of KV memory, beyond what the largest request needs
    prefix_caching: bool
    faults: frozenset[int]


plans = st.builds(
    Plan,
    gap=st.integers(0, 4),
    num_shared=st.sampled_from([0, 16, 20, 48]),
    tail=st.integers(0, len(TAILS) - 1),
    max_new_tokens=st.integers(1, 14),
    seed=st.none() | st.integers(0, 3),
    priority=st.integers(-1, 1),
    draft=st.sampled_from([True, True, True, False]),
    abort_after=st.none() | st.none() | st.integers(0, 12),
)
engine_settings = st.builds(
    Setting,
    max_batch_size=st.integers(1, 6),
    prefill_chunk_tokens=st.sampled_from([1, 5, 24, 512]),
    max_step_tokens=st.none() | st.integers(4, 40),
    spare_tokens=st.sampled_from([16, 48, 96, 400]),
    prefix_caching=st.booleans(),
    faults=st.frozensets(st.integers(0, 60), max_size=3),
)


class Broken(Exception):
    """A step that fails."""


def sampling(plan: Plan) -> SamplingParams:
    return SamplingParams() if plan.seed is None else SamplingParams(temperature=0.9, top_p=0.95, seed=plan.seed)


@cache
def solo_engine() -> Engine:
    return engine_of(model_of(named("llama")), runner=private_runner(model_of(named("llama"))))


@cache
def alone(prompt: tuple[int, ...], seed: int | None) -> list[int]:
    """Return the longest answer: a shorter one is its beginning."""
    plan = Plan(0, 0, 0, 14, seed, 0, True, None)
    request = add(solo_engine(), prompt, 14, sampling=sampling(plan))
    drain(solo_engine())
    return request.new_tokens


def engine_with(name: str, setting: Setting) -> Engine:
    model = model_of(named("llama"))
    size = private_runner(model).cache.bytes_per_token
    # What a drafter keeps beside the KV counts against the limit too.
    features = 2 if name == "eagle" else 1
    limit = (MOST_TOKENS + 16 + setting.spare_tokens) * size * features
    runner = private_runner(model, kv_memory_bytes=limit)
    runner.cache.prefix_caching = setting.prefix_caching
    options: dict[str, Any] = {}
    if name == "draft_model":
        options = {"model": model_of(named("qwen2"))}
    elif name == "eagle":
        options = {"model": tiny_eagle(runner, generation=1, drafted=None)}
    return engine_of(
        model,
        name,
        options,
        runner=runner,
        max_draft_tokens=3,
        max_batch_size=setting.max_batch_size,
        prefill_chunk_tokens=setting.prefill_chunk_tokens,
        max_step_tokens=setting.max_step_tokens,
        prefix_caching=setting.prefix_caching,
    )


def break_some(engine: Engine, faults: frozenset[int]) -> None:
    """Let these forwards of the target fail when all is computed and nothing is kept yet."""
    forward, count = engine.target.forward, 0

    def run(*args: Any) -> Any:
        nonlocal count
        count += 1
        result = forward(*args)
        if count - 1 in faults:
            raise Broken
        return result

    engine.target.forward = run  # type: ignore[method-assign]


def run(engine: Engine, schedule: list[Plan]) -> list[tuple[Plan, Request]]:
    """Run a schedule to its end, through the steps that fail."""
    coming, live, due = list(schedule), [], schedule[0].gap
    done: list[tuple[Plan, Request]] = []
    for now in range(3000):
        while coming and due <= now:
            plan = coming.pop(0)
            stop = StopRules(max_new_tokens=plan.max_new_tokens)
            request = engine.add_request(plan.prompt, sampling(plan), stop, priority=plan.priority, draft=plan.draft)
            live.append((now, plan, request))
            done.append((plan, request))
            due = now + coming[0].gap if coming else now
        if not coming and not engine.has_unfinished:
            return done
        with suppress(Broken):
            engine.step()
        for begun, plan, request in live:
            if plan.abort_after is not None and now - begun >= plan.abort_after and request.finish_reason is None:
                engine.abort(request.request_id)
    raise AssertionError("the schedule does not end")


def check(engine: Engine, done: list[tuple[Plan, Request]]) -> None:
    for plan, request in done:
        expected = alone(plan.prompt, plan.seed)[: plan.max_new_tokens]
        if request.finish_reason == "abort":
            expected = expected[: request.num_new_tokens]
        assert request.new_tokens == expected, plan
        assert request.finish_reason in ("length", "abort")
    caches = [engine.target.cache]
    if hasattr(engine.drafter, "own_cache"):
        caches.append(engine.drafter.own_cache)
    for cache_ in caches:
        cache_.check_integrity()
        assert cache_.usage()["num_used"] == 0, "a block leaked"


@pytest.mark.parametrize("drafter", DRAFTERS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=engine_settings, schedule=st.lists(plans, min_size=PER_SCHEDULE, max_size=PER_SCHEDULE))
def test_everybody_gets_what_he_would_get_alone(drafter: str, setting: Setting, schedule: list[Plan]) -> None:
    engine = engine_with(drafter, setting)
    break_some(engine, setting.faults)
    check(engine, run(engine, schedule))


CROWDED = Setting(4, 24, None, 48, True, frozenset({3, 9}))
CROWD = [
    Plan(0, (0, 16, 20, 48)[i % 4], i % 12, 14, i % 3 or None, i % 3 - 1, i % 5 != 4, 4 if i % 7 == 6 else None)
    for i in range(20)
]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_crowd_preempts_and_shares(drafter: str) -> None:
    """What the generated schedules are about does happen in such schedules."""
    engine = engine_with(drafter, CROWDED)
    break_some(engine, CROWDED.faults)
    done = run(engine, CROWD)
    check(engine, done)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 0
    assert {request.finish_reason for _, request in done} == {"length", "abort"}
    drafted = sum(request.stats.num_draft_tokens for _, request in done)
    assert (drafted > 0) == (drafter != "none")


def engine_of_blocks(count: int, **options: Any) -> Engine:
    model = model_of(named("llama"))
    cache = private_runner(model).cache
    runner = private_runner(model, kv_memory_bytes=count * cache.block_tokens * cache.bytes_per_token)
    return engine_of(model, runner=runner, **options)


def test_nobody_is_let_in_on_the_block_of_another() -> None:
    """Opening takes no memory, so what those before it still need of the free blocks has to be kept."""
    engine = engine_of_blocks(7)
    requests = [add(engine, prompt, 2) for prompt in prompts(*[40] * 6, seed=5)]
    drain(engine)
    assert engine.stats.num_preemptions == 0
    assert all(r.num_new_tokens == 2 for r in requests)


def test_drafts_take_no_block_that_a_row_needs() -> None:
    """The first has room for its drafts only if the second, of a worse rank, goes without its own row."""
    engine = engine_of_blocks(5, drafter="random", max_draft_tokens=3)
    drafts, short = (add(engine, prompt, n) for prompt, n in zip(prompts(30, 32, seed=6), (6, 2), strict=True))
    drain(engine)
    assert engine.stats.num_preemptions == 0
    assert (drafts.num_new_tokens, short.num_new_tokens) == (6, 2)
    assert drafts.stats.num_draft_tokens > 0


def test_the_limit_counts_hidden_states_before_there_are_any() -> None:
    """Were they counted only when the first are stored, blocks would be taken that may not be there any more."""
    engine = engine_with("eagle", CROWDED)
    cache = engine.target.cache
    num_blocks, size = cache.num_blocks, cache.bytes_per_token
    check(engine, run(engine, CROWD[:6]))
    assert (cache.num_blocks, cache.bytes_per_token) == (num_blocks, size)
    assert size > private_runner(model_of(named("llama"))).cache.bytes_per_token


def test_a_wrong_answer_would_be_seen() -> None:
    engine = engine_with("none", CROWDED)
    done = run(engine, CROWD[:4])
    done[2][1].tokens[-1] ^= 1
    with pytest.raises(AssertionError):
        check(engine, done)
