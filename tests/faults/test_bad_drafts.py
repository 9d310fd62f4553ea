"""Faults 23 and 24: a drafter costs speed at worst, and drafting nothing costs nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import specdec
from specdec.errors import OutOfCacheError
from specdec.interfaces import DraftRequest, Noise, SamplingParams, TokenTree, empty_tree
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.stats import total
from tests.decoding import GREEDY, add, drain, engine_of, one, prompts, reference
from tests.models.architectures import build, model_of, named
from tests.odd_drafters import WRONG_SHAPES, Plain, Wrapped, spoil, spoil_probs

PROMPTS = prompts(3, 7, 12)
NODE_FAULTS = [
    "id_too_large", "id_negative", "wrong_root", "root_has_parent", "parent_after_child", "parent_missing", "no_nodes",
    "too_many_nodes", "too_many_drafts",
]  # fmt: skip
PROB_FAULTS = ["nan", "infinite", "negative", "sum_of_two", "row_outside", "never_drawn"]
SAMPLED = SamplingParams(temperature=1.0, seed=7)


def run(drafter: Any, sampling: SamplingParams = GREEDY, verifier: str = "auto", **options: Any) -> list[Request]:
    engine = engine_of(model_of(named("llama")), drafter, verifier=verifier, max_draft_tokens=4, **options)
    requests = [add(engine, prompt, 14, sampling=sampling) for prompt in PROMPTS]
    drain(engine)
    engine.target.cache.check_integrity()
    return requests


def oracle(change: Callable[[TokenTree, Sequence[DraftRequest]], Any]) -> Wrapped:
    inner = engine_of(model_of(named("llama")), "oracle").drafter
    return Wrapped(inner, change)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("rows", ["all", "one", "rotating"])
@pytest.mark.parametrize("kind", NODE_FAULTS)
def test_fault_23_invalid_nodes(kind: str, rows: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the whole batch, in one row of it, in another row each step."""
    spoilt: list[int] = []

    def change(tree: TokenTree, requests: Sequence[DraftRequest]) -> TokenTree:
        count = len(requests)
        chosen = {"all": range(count), "one": [min(1, count - 1)], "rotating": [len(spoilt) % count]}[rows]
        spoilt.append(len(chosen))
        return spoil(tree, requests, kind, chosen)

    requests = run(oracle(change))
    assert [r.new_tokens for r in requests] == [reference(model_of(named("llama")), p, 14) for p in PROMPTS]
    assert sum(r.stats.num_rejected_drafts for r in requests) == sum(spoilt) > 0
    assert len(warnings_of(caplog)) == 1
    assert "'oracle' proposed an invalid tree" in warnings_of(caplog)[0]
    if rows == "all":
        assert all(r.stats.num_draft_tokens == 0 for r in requests)
    else:
        assert sum(r.stats.num_accepted_tokens for r in requests) > 0


@pytest.mark.parametrize("kind", WRONG_SHAPES)
def test_fault_23_wrong_shapes(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    requests = run(oracle(lambda tree, requests: WRONG_SHAPES[kind](tree)))
    assert [r.new_tokens for r in requests] == [reference(model_of(named("llama")), p, 14) for p in PROMPTS]
    assert all(r.stats.num_rejected_drafts == r.stats.num_steps - 1 for r in requests[:1])
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("kind", PROB_FAULTS)
def test_fault_23_draft_probs_that_mean_nothing(kind: str, verifier: str, caplog: pytest.LogCaptureFixture) -> None:
    inner = engine_of(model_of(named("llama")), "draft_model", {"model": model_of(named("qwen2"))}).drafter
    got = run(Wrapped(inner, lambda tree, requests: spoil_probs(tree, kind)), SAMPLED, verifier)
    plain = run("none", SAMPLED, verifier)
    assert [r.tokens for r in got] == [r.tokens for r in plain]
    assert all(r.stats.num_draft_tokens == 0 for r in got)
    assert all(r.stats.num_rejected_drafts > 0 for r in got)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_fault_23_a_broken_draft_model(verifier: str, sampling: SamplingParams) -> None:
    """Its logits are NaN from the first token on."""
    draft = build(named("llama"), seed=1)
    inner = engine_of(model_of(named("llama")), "draft_model", {"model": draft}).drafter
    draft.lm_head.weight.fill_(torch.nan)  # after it was built, which would have refused it
    got = run(inner, sampling, verifier)
    assert [r.tokens for r in got] == [r.tokens for r in run("none", sampling, verifier)]
    if not sampling.greedy:
        assert all(r.stats.num_rejected_drafts > 0 for r in got)


def test_fault_23_a_drafter_without_memory(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Plain):
        def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
            raise OutOfCacheError("no room for drafts")

    requests = run(Full())
    assert [r.new_tokens for r in requests] == [reference(model_of(named("llama")), p, 14) for p in PROMPTS]
    assert len(warnings_of(caplog)) == 1
    assert "no room for drafts" in warnings_of(caplog)[0]
    assert all(r.stats.num_missed_drafts > 0 for r in requests)
    assert total(r.stats for r in requests).num_missed_drafts == sum(r.stats.num_missed_drafts for r in requests)


@pytest.mark.parametrize("kind", ["empty", "own_tree", "more_of_some"])
def test_fault_23_fewer_drafts_than_allowed_are_fine(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def change(tree: TokenTree, requests: Sequence[DraftRequest]) -> TokenTree:
        if kind == "empty":
            return empty_tree(requests)
        if kind == "own_tree":
            return TokenTree(tree.token_ids, tree.parents, torch.ones_like(tree.num_nodes))
        few = torch.arange(len(requests)) % 3 + 1
        return TokenTree(tree.token_ids, tree.parents, torch.minimum(tree.num_nodes, few))

    requests = run(oracle(change))
    assert [r.new_tokens for r in requests] == [reference(model_of(named("llama")), p, 14) for p in PROMPTS]
    assert sum(r.stats.num_rejected_drafts for r in requests) == 0
    assert not warnings_of(caplog)


class TestFault24:
    """Drafting nothing is plain decoding."""

    @pytest.fixture
    def forwards(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return a list that fills with the rows of every forward."""
        rows: list[int] = []
        forward = ModelRunner.forward

        def counted(self: ModelRunner, segments: Any, *args: Any) -> Any:
            rows.append(sum(len(s.token_ids) for s in segments))
            return forward(self, segments, *args)

        model = model_of(named("llama"))
        engine_of(model)  # built, so that the probe is not counted
        monkeypatch.setattr(ModelRunner, "forward", counted)
        return rows

    def test_fault_24_one_row_per_token(self, forwards: list[int]) -> None:
        model = model_of(named("llama"))
        specdec.generate(model, one(PROMPTS[1]), max_new_tokens=14, do_sample=False)
        assert forwards == [7] + [1] * 13

    @pytest.mark.parametrize("drafter", ["ngram", "oracle", "random"])
    def test_fault_24_no_draft_tokens_no_proposal(self, drafter: str, forwards: list[int]) -> None:
        model = model_of(named("llama"))
        wrapped = Wrapped(engine_of(model, drafter).drafter)
        specdec.generate(model, one(PROMPTS[1]), max_new_tokens=14, drafter=wrapped, max_draft_tokens=0)
        assert wrapped.num_proposals == 0
        assert forwards == [7] + [1] * 13

    def test_fault_24_the_none_drafter_is_never_asked(self) -> None:
        wrapped = Wrapped(engine_of(model_of(named("llama"))).drafter)
        requests = run(wrapped)
        assert wrapped.num_proposals == 0
        assert [r.stats.num_steps for r in requests] == [13] * 3
        assert all(r.stats.acceptance_rate is None and r.stats.acceptance_length == 1.0 for r in requests)

    def test_fault_24_the_last_token_is_not_worth_drafting(self) -> None:
        wrapped = Wrapped(engine_of(model_of(named("llama")), "oracle").drafter)
        engine = engine_of(model_of(named("llama")), wrapped)
        add(engine, PROMPTS[0], 2)
        drain(engine)
        assert wrapped.num_proposals == 0

    @pytest.mark.parametrize("width", [1, 2])
    def test_fault_24_the_adversary_costs_rows_only(self, width: int) -> None:
        """As many target steps as plain decoding, and the same tokens."""
        requests = run("adversary", drafter_options={"width": width})
        assert [r.new_tokens for r in requests] == [reference(model_of(named("llama")), p, 14) for p in PROMPTS]
        assert [r.stats.num_steps for r in requests] == [13] * 3
        assert all(r.stats.acceptance_rate == 0.0 for r in requests)
