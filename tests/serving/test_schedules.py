"""Whatever is scheduled with whatever, every request gets what it would get alone, and no block leaks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.draft_length import CostAwareLength
from specdec.engine import Engine
from specdec.interfaces import SamplingParams
from specdec.request import Request, StopRules
from specdec.scheduler import LEAST_AHEAD, Work
from tests.decoding import add, drain, engine_of, looking_ahead, private_runner, prompts
from tests.draft_length.simulator import FLAT
from tests.heads.tiny_heads import tiny_eagle
from tests.models.architectures import model_of, named

SHARED = prompts(48, seed=1)[0]  # what prompts begin with
TAILS = prompts(*range(1, 13), seed=2)
MOST_TOKENS = 48 + 12 + 14
# Name, and what it is built with; "random_tree" and "token_recycling" draft trees.
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {},
    "suffix": {"share": True},
    "random": {},
    "random_tree": {"branching": [2, 1]},
    "token_recycling": {"tree": [2, 1]},
    "draft_model": {},
    "early_exit": {},
    "eagle": {},
}
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
    draft_length: str = "static"
    verifier: str = "auto"
    kv_dtype: str | None = None
    least_ahead: int = 1  # tokens; few, so that these short answers are let in on memory that is not there

    @property
    def is_exact(self) -> bool:
        """Whether sampled ids are those of the solo run; under `rejection` only their distribution is."""
        return self.verifier == "auto"


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
    draft_length=st.sampled_from(["static", "confidence", "cost_aware", "cost_aware"]),
    verifier=st.sampled_from(["auto", "auto", "rejection"]),
    kv_dtype=st.sampled_from([None, None, "int8"]),
    least_ahead=st.sampled_from([1, 1, LEAST_AHEAD]),
)


class Broken(Exception):
    """A step that fails."""


def sampling(plan: Plan) -> SamplingParams:
    return SamplingParams() if plan.seed is None else SamplingParams(temperature=0.9, top_p=0.95, seed=plan.seed)


@cache
def solo_engine(kv_dtype: str | None) -> Engine:
    return engine_of(model_of(named("llama")), runner=private_runner(model_of(named("llama")), kv_dtype=kv_dtype))


@cache
def alone(prompt: tuple[int, ...], seed: int | None, kv_dtype: str | None = None) -> list[int]:
    """Return the longest answer: a shorter one is its beginning."""
    plan, engine = Plan(0, 0, 0, 14, seed, 0, True, None), solo_engine(kv_dtype)
    request = add(engine, prompt, 14, sampling=sampling(plan))
    drain(engine)
    return request.new_tokens


def engine_with(name: str, setting: Setting) -> Engine:
    model = model_of(named("llama"))
    runner = private_runner(model, kv_dtype=setting.kv_dtype)
    runner.cache.prefix_caching = setting.prefix_caching
    options = dict(DRAFTERS[name])
    if name == "draft_model":
        options = {"model": model_of(named("qwen2"))}
    elif name == "eagle":
        options = {"model": tiny_eagle(runner, generation=1, drafted=None)}
    engine = engine_of(
        model,
        name.removesuffix("_tree"),
        options,
        verifier=setting.verifier,
        runner=runner,
        policy=CostAwareLength(FLAT) if setting.draft_length == "cost_aware" else None,
        draft_length=setting.draft_length,
        max_draft_tokens=3,
        max_batch_size=setting.max_batch_size,
        prefill_chunk_tokens=setting.prefill_chunk_tokens,
        max_step_tokens=setting.max_step_tokens,
        prefix_caching=setting.prefix_caching,
    )
    # Now that it is known what the drafter keeps beside the KV, which counts against the limit too.
    runner.cache.max_bytes = (MOST_TOKENS + 16 + setting.spare_tokens) * runner.cache.bytes_per_token
    return looking_ahead(engine, setting.least_ahead)


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


def check(engine: Engine, setting: Setting, done: list[tuple[Plan, Request]]) -> None:
    for plan, request in done:
        assert request.finish_reason in ("length", "abort")
        assert request.finish_reason == "abort" or request.num_new_tokens == plan.max_new_tokens
        if plan.seed is None or setting.is_exact:
            expected = alone(plan.prompt, plan.seed, setting.kv_dtype)
            assert request.new_tokens == expected[: request.num_new_tokens], plan
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
    check(engine, setting, run(engine, schedule))


def crowd(count: int) -> list[Plan]:
    """Return many requests of few kinds, as their solo runs take time."""
    return [
        Plan(
            gap=(0, 0, 0, 1)[i % 4],
            num_shared=(0, 16, 20, 48)[i % 4],
            tail=i % 6,
            max_new_tokens=2 + 5 * i % 13,
            seed=i % 3 or None,
            priority=i % 5 - 2,
            draft=i % 7 != 4,
            abort_after=i % 11 if i % 9 == 6 else None,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_hundred_through_one_engine(drafter: str) -> None:
    """The same at the size that is promised, with all of it happening to the same engine."""
    number = list(DRAFTERS).index(drafter)
    setting = Setting(
        max_batch_size=24,
        prefill_chunk_tokens=96,
        max_step_tokens=(None, 64)[number % 2],
        spare_tokens=96,
        prefix_caching=True,
        faults=frozenset(range(5, 60, 11)),
        draft_length=("static", "cost_aware", "confidence")[number % 3],
        kv_dtype=(None, None, "int8")[number // 3],
    )
    engine = engine_with(drafter, setting)
    break_some(engine, setting.faults)
    done = run(engine, crowd(200))
    check(engine, setting, done)
    assert len(done) == 200
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 1000
    assert sum(request.finish_reason == "abort" for _, request in done) > 10


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
    check(engine, CROWDED, done)
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
    check(engine, CROWDED, run(engine, CROWD[:6]))
    assert (cache.num_blocks, cache.bytes_per_token) == (num_blocks, size)
    assert size > private_runner(model_of(named("llama"))).cache.bytes_per_token


def test_a_wrong_answer_would_be_seen() -> None:
    engine = engine_with("none", CROWDED)
    done = run(engine, CROWD[:4])
    done[2][1].tokens[-1] ^= 1
    with pytest.raises(AssertionError):
        check(engine, CROWDED, done)


class Linear:
    """t(M) of a machine on which every row takes half as long as the first."""

    def at(self, rows: int) -> float:
        return 0.005 * (1 + rows)


def test_a_try_of_the_policy_may_lose_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    """It is allotted before memory is; the policy then hears of a step in which its try was not made."""
    engine = engine_of_blocks(16, drafter="adversary", policy=CostAwareLength(Linear()))
    request, give = add(engine, prompts(5)[0], 200), engine.residency._with_drafts
    tries = []

    def none_left(w: Work) -> Work:
        tries.append(w.max_draft_tokens)
        return replace(w, max_draft_tokens=0) if request.num_new_tokens > 40 else give(w)

    engine.residency._with_drafts = none_left  # type: ignore[method-assign]
    with caplog.at_level("WARNING", "specdec"):
        drain(engine)
    assert request.num_new_tokens == 200
    assert sum(tries[-100:]) > 50, "it is made again and again, as it was not paid"
    assert not [r for r in caplog.records if "draft length" in r.getMessage()]
