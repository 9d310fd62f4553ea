"""Following requests: whoever steps the engine, nothing is missed, and a step costs what had news in it."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.engine import Engine
from specdec.request import Request
from specdec.running import Follower
from tests.decoding import add, engine_of, prompts
from tests.models.architectures import model_of, named


def begun(number: int, max_new_tokens: int = 6, **options: Any) -> tuple[Engine, list[Request]]:
    engine = engine_of(model_of(named("llama")), **options)
    return engine, [add(engine, prompt, max_new_tokens) for prompt in prompts(*[5] * number)]


def read(follow: Follower, most_rounds: int = 100) -> list[list[int]]:
    """Follow requests to their ends and return what was handed out of each."""
    found: list[list[int]] = [[] for _ in follow.requests]
    for _ in range(most_rounds):
        if follow.is_done:
            return found
        follow.advance()
        for i, first in follow.take():
            assert first == len(found[i])
            found[i] += follow.requests[i].new_tokens[first:]
    raise AssertionError("the requests do not end")


def test_a_step_costs_what_had_news(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = begun(40, max_batch_size=2)
    looked: list[int] = []
    look = Follower._has_news

    def counting(self: Follower, i: int) -> bool:
        looked.append(i)
        return look(self, i)

    monkeypatch.setattr(Follower, "_has_news", counting)
    assert read(Follower(engine, requests), 200) == [r.new_tokens for r in requests]
    # All of them at the beginning and behind the first step, then those that emitted.
    assert len(looked) <= 2 * 40 + 40 * 6


def test_steps_of_others_are_noticed() -> None:
    engine, requests = begun(4)
    ours, others = Follower(engine, requests[:2]), Follower(engine, requests[2:])
    others.advance()
    before = engine.stats.num_steps
    ours.advance()
    assert engine.stats.num_steps == before, "a step, although there was something to hand out"
    assert [i for i, _ in ours.take()] == [0, 1]
    ours = Follower(engine, requests[:2])
    assert read(others) == [r.new_tokens for r in requests[2:]]
    before = engine.stats.num_steps
    assert read(ours) == [r.new_tokens for r in requests[:2]]
    assert engine.stats.num_steps == before


@pytest.mark.parametrize("others_run", [False, True])
def test_what_somebody_else_was_handed_is_not_waited_for(others_run: bool) -> None:
    """A step without work counts nowhere, and hands out what was left."""
    engine, (own, other) = begun(2)
    follow = Follower(engine, [own])
    follow.advance()
    follow.take()
    engine.abort(own.request_id)
    if not others_run:
        engine.abort(other.request_id)
    engine.step()  # hands the end out, to nobody
    for _ in range(10):
        if follow.is_done:
            break
        follow.advance()
        follow.take()
    assert follow.is_done
