"""The policies by name, and through an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec.draft_length import DRAFT_LENGTHS, ConfidenceLength, CostAwareLength, StaticLength, build_draft_length
from specdec.errors import ConfigError, SpecdecError
from specdec.interfaces import SamplingParams
from specdec.request import Request, StopRules
from specdec.scheduler import Work
from tests.decoding import add, engine_of, prompts, reference
from tests.draft_length.simulator import CPU
from tests.models.architectures import model_of, named


def refuse() -> Any:
    raise AssertionError("nothing is timed for this policy")


def test_by_name() -> None:
    static = build_draft_length("static", step_times=refuse)
    sure = build_draft_length("confidence", step_times=refuse, confidence_threshold=0.3)
    aware = build_draft_length("cost_aware", step_times=lambda: CPU)
    policies = (static, sure, aware)
    assert tuple(p.name for p in policies) == DRAFT_LENGTHS
    assert [p.min_confidence for p in policies] == [0.0, 0.3, 0.0]
    work = [Work(Request(0, [1, 2], SamplingParams(), StopRules(max_new_tokens=9), 0), 1, 4, True, False)]
    assert static.allot(work) is work
    assert sure.allot(work) is work
    for policy in policies:
        policy.release(7)  # never seen: nothing happens


def test_unknown_names_and_thresholds_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cost_aware'"):
        build_draft_length("cost_awar", step_times=refuse)
    for threshold in (-0.1, 1.5, float("nan"), True, "0.4"):
        with pytest.raises(SpecdecError, match=r"confidence_threshold=.*allowed"):
            build_draft_length("confidence", step_times=refuse, confidence_threshold=threshold)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafter", "options"),
    [("adversary", {}), ("random", {}), ("oracle", {"accept_rate": 0.8}), ("oracle", {"width": 2}), ("ngram", {})],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_fault_01_the_output_is_the_targets(drafter: str, options: dict[str, Any], batch: int) -> None:
    model = model_of(named("llama"))
    engine = engine_of(model, drafter, options, max_draft_tokens=6)
    engine.draft_length = CostAwareLength(CPU)
    texts = prompts(*(3 + 4 * i for i in range(batch)))
    requests = [add(engine, text, 40) for text in texts]
    while engine.has_unfinished:
        engine.step()
    assert [r.new_tokens for r in requests] == [reference(model, text, 40) for text in texts]


def test_fault_24_an_adversary_is_switched_off_in_the_engine() -> None:
    model = model_of(named("llama"))
    engine = engine_of(model, "adversary", max_draft_tokens=4)
    engine.draft_length = CostAwareLength(CPU)
    request = add(engine, prompts(5)[0], 60)
    drafted_at = []
    while engine.has_unfinished:
        before, had = request.stats.num_draft_tokens, len(request.new_tokens)
        engine.step()
        if request.stats.num_draft_tokens > before:
            drafted_at.append(had)
    assert drafted_at
    assert max(drafted_at) <= 32


class Faulty(StaticLength):
    """A policy one method of which raises, or answers what was not asked."""

    name = "faulty"

    def __init__(self, where: str) -> None:
        self.where = where

    def _raise(self, where: str) -> None:
        if self.where == where:
            raise StopIteration

    def allot(self, work: Sequence[Work]) -> Sequence[Work]:
        self._raise("allot")
        if self.where == "too many":
            return [replace(w, max_draft_tokens=w.max_draft_tokens + 1) for w in work]
        return list(work)[1:] if self.where == "too few" else work

    def learn(self, work: Sequence[Work], verdicts: Sequence[Any], draft_s: float) -> None:
        self._raise("learn")

    def release(self, request_id: int) -> None:
        self._raise("release")


@pytest.mark.parametrize("where", ["allot", "learn", "release", "too many", "too few"])
def test_a_faulty_policy_costs_drafts_and_stalls_nobody(where: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(named("llama"))
    engine = engine_of(model, "random", policy=Faulty(where))
    texts = prompts(3, 8)
    requests = [add(engine, text, 12) for text in texts]
    with caplog.at_level(logging.WARNING, "specdec"):
        for _ in range(40):
            engine.step()
    assert [r.new_tokens for r in requests] == [reference(model, text, 12) for text in texts]
    assert not engine.has_unfinished
    drafted = sum(r.stats.num_draft_tokens for r in requests)
    assert (drafted > 0) == (where in ("learn", "release"))
    said = [r.getMessage() for r in caplog.records if "draft length 'faulty'" in r.getMessage()]
    assert len(said) == 1


def test_an_engine_follows_its_config() -> None:
    """Also one that is built without `build_engine`: a knob without effect would be dropped silently."""
    model = model_of(named("llama"))
    for name, kind in (("static", StaticLength), ("confidence", ConfidenceLength), ("cost_aware", CostAwareLength)):
        engine = engine_of(model, "ngram", draft_length=name, confidence_threshold=0.3)
        assert type(engine.draft_length) is kind
    assert engine_of(model, draft_length="confidence", confidence_threshold=0.3).draft_length.min_confidence == 0.3


def test_reset_forgets_what_drafts_came_to() -> None:
    policy = CostAwareLength(CPU)
    engine = engine_of(model_of(named("llama")), "adversary", {}, max_draft_tokens=6, policy=policy)

    def drafted() -> int:
        request = add(engine, prompts(9)[0], 40)
        while engine.has_unfinished:
            engine.step()
        engine.forget(request.request_id)
        return request.stats.num_draft_tokens

    first, again = drafted(), drafted()
    assert again < first  # it knows by then that nothing comes of it
    policy.reset()
    assert policy._cost.is_blank
    assert drafted() > again  # what drafting takes is measured, so not always as often as at first
