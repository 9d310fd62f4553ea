"""What happens in the middle of a step: callbacks that use the engine, streams that are collected, steps run again."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest

import specdec
from specdec import ConfigError
from specdec.interfaces import DraftRequest, Noise, Observation, TokenTree
from tests.models.architectures import model_of, named
from tests.odd_drafters import Plain
from tests.serving.engines import PROMPTS, assert_empty, drain, engine, solo
from tests.tiny_chat_model import tiny_tokenizer


class Once:
    """A logits processor that does something at its second call and leaves the scores alone."""

    def __init__(self, act: Any) -> None:
        self.act, self.num_calls = act, 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 2:
            self.act()
        return scores


def test_a_processor_that_aborts_another_request() -> None:
    serving = engine()
    other = serving.add_request(PROMPTS[1], max_new_tokens=200)
    act = Once(lambda: serving.abort(other))
    own = serving.add_request(PROMPTS[0], max_new_tokens=12, logits_processor=[act])
    found = drain(serving)
    assert found[own].token_ids == solo(PROMPTS[0], 12)
    assert found[other].finish_reason == "abort"
    told = found[other].token_ids
    assert told == solo(PROMPTS[1], 200)[: len(told)]
    assert_empty(serving)


def test_a_processor_that_aborts_its_own_request() -> None:
    serving = engine()
    ids: list[int] = []
    ids.append(
        serving.add_request(PROMPTS[0], max_new_tokens=99, logits_processor=[Once(lambda: serving.abort(ids[0]))])
    )
    assert drain(serving)[ids[0]].finish_reason == "abort"
    assert_empty(serving)


@pytest.mark.parametrize("door", ["step", "generate"])
def test_a_step_inside_of_a_step_ends_the_request_whose_processor_it_was(door: str) -> None:
    serving = engine()
    inner = {"step": serving.step, "generate": lambda: serving.llm.generate(PROMPTS[2], max_new_tokens=4)}[door]
    other = serving.add_request(PROMPTS[1], max_new_tokens=12)
    own = serving.add_request(PROMPTS[0], max_new_tokens=12, logits_processor=[Once(inner)])
    found = drain(serving)
    assert found[own].finish_reason == "error"
    assert isinstance(found[own].error, ConfigError)
    assert "inside of its own step" in str(found[own].error)
    assert found[other].token_ids == solo(PROMPTS[1], 12)
    assert_empty(serving)


def test_a_stream_that_is_collected_in_the_middle_of_a_step() -> None:
    llm = specdec.LLM(model_of(named("llama")), tokenizer=tiny_tokenizer(), drafter="ngram")
    kept = {"stream": llm.stream(PROMPTS[1], max_new_tokens=200)}
    next(kept["stream"])

    def collect() -> None:
        kept.clear()
        gc.collect()

    done = llm.generate(PROMPTS[0], max_new_tokens=12, logits_processor=[Once(collect)])
    assert done[0].token_ids == solo(PROMPTS[0], 12)
    assert not llm.engine.has_unfinished
    assert not llm.engine._requests
    llm.engine.target.cache.check_integrity()


def test_a_criterion_is_asked_once_however_often_a_step_is_run() -> None:
    """A neighbour's fault makes the step run again; who counts its own calls must not notice."""
    calls = 0

    def count(input_ids: Any, scores: Any, **unused: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls >= 8

    faults = 0

    def fail_once(input_ids: Any, scores: Any, **unused: Any) -> bool:
        nonlocal faults
        faults += 1
        if faults == 3:
            raise RuntimeError("own fault")
        return False

    serving = engine()
    good = serving.add_request(PROMPTS[0], max_new_tokens=20, stopping_criteria=[count])
    bad = serving.add_request(PROMPTS[1], max_new_tokens=20, stopping_criteria=[fail_once])
    found = drain(serving)
    assert found[bad].finish_reason == "error"
    assert found[good].token_ids == solo(PROMPTS[0], 20)[:8]


class Panic(BaseException):
    """As libraries written in other languages raise it."""


def test_a_panic_of_a_processor_ends_its_own_request() -> None:
    def panic() -> None:
        raise Panic

    serving = engine()
    own = serving.add_request(PROMPTS[0], max_new_tokens=12, logits_processor=[Once(panic)])
    other = serving.add_request(PROMPTS[1], max_new_tokens=12)
    found = drain(serving)
    assert isinstance(found[own].error, Panic)
    assert found[other].token_ids == solo(PROMPTS[1], 12)
    assert_empty(serving)


@pytest.mark.parametrize(("option", "value"), [("draft", "no"), ("draft", None), ("ignore_eos", "x")])
def test_what_is_read_while_scheduling_is_checked_before(option: str, value: Any) -> None:
    serving = engine()
    with pytest.raises(ConfigError, match=f"{option}={value!r}; allowed: True or False"):
        serving.add_request(PROMPTS[0], **{option: value})
    assert_empty(serving)


class _Cache:
    """The little of a KV cache that is looked at here."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def is_open(self, request_id: int) -> bool:
        return request_id in self.held

    def release(self, request_id: int) -> None:
        self.held.discard(request_id)

    def usage(self) -> dict[str, float]:
        return {"num_used": len(self.held)}

    def check_integrity(self) -> None: ...


class CannotRelease(Plain):
    """Has a cache of its own and fails before it gives anything back."""

    def __init__(self) -> None:
        super().__init__()
        self.own_cache = _Cache()

    def observe(self, observations: Sequence[Observation]) -> None:
        self.own_cache.held.update(o.request_id for o in observations)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        raise RuntimeError("cannot do this either")

    def release(self, request_id: int) -> None:
        raise RuntimeError("cannot")


def test_a_drafter_that_cannot_release_holds_no_memory() -> None:
    """Its cache shares the target's memory limit."""
    serving = engine(drafter=CannotRelease())
    own = serving.add_request(PROMPTS[0], max_new_tokens=6)
    assert drain(serving)[own].token_ids == solo(PROMPTS[0], 6)
    assert_empty(serving)
