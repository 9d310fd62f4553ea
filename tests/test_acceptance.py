"""Which rule a request gets, where its answer is cropped, and steps in which several rules apply."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import specdec
from specdec.acceptance import VerifierChoice, accepted_paths, judge
from specdec.build import build_verifiers
from specdec.errors import ConfigError
from specdec.interfaces import SamplingParams, TokenTree, VerifyResult
from specdec.noise import KeyedNoise
from specdec.request import Request, StopRules
from specdec.scheduler import Work
from specdec.tree import stack_trees
from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier
from tests.decoding import GREEDY, add, drain, engine_of, one, private_runner, prompts, reference
from tests.models.architectures import build, model_of, named

PROMPTS = prompts(3, 7, 12, 5, 9)
SEEDED, FREE = SamplingParams(temperature=1.0, seed=8), SamplingParams(temperature=1.0)


class TestAuto:
    choice = build_verifiers("auto")

    @pytest.mark.parametrize(
        ("sampling", "drafter_samples", "name"),
        [
            (GREEDY, True, "match"), (GREEDY, False, "match"), (SEEDED, True, "match"), (SEEDED, False, "match"),
            (FREE, True, "rejection"), (FREE, False, "match"),
        ],
    )  # fmt: skip
    def test_the_rule(self, sampling: SamplingParams, drafter_samples: bool, name: str) -> None:
        assert self.choice.of(sampling, drafter_samples).name == name

    def test_groups(self) -> None:
        groups = self.choice.groups([FREE, GREEDY, FREE, SEEDED], True)
        assert [(verifier.name, members) for verifier, members in groups] == [("rejection", [0, 2]), ("match", [1, 3])]
        assert self.choice.groups([FREE, GREEDY], False) == [(self.choice.greedy, [0, 1])]
        assert self.choice.groups([], True) == []


class TestJudge:
    """A tree 0 -> (1 -> 3 -> 4, 2) with tokens 10..14, after three pending tokens of which one is the root."""

    parents = (-1, 0, 0, 1, 3)

    def verdict(self, path: list[int], token: int, *, pending: int = 1, most: int = 9, eos: Sequence[int] = ()) -> Any:
        request = Request(0, [1, 2, 10], GREEDY, StopRules(max_new_tokens=most, eos_token_ids=frozenset(eos)), 0)
        tree = stack_trees([(range(10, 15), self.parents)])
        return judge([Work(request, pending, 4, True, False)], [(path, token)], tree)[0]

    def test_the_whole_path(self) -> None:
        v = self.verdict([1, 3, 4], 50)
        assert (v.tokens, v.kept.tolist(), v.path.tolist()) == ([11, 13, 14, 50], [0, 1, 3, 4], [1, 3, 4])
        assert (v.finish_reason, v.num_accepted, v.drafted, v.depth) == (None, 3, 4, 3)

    def test_nothing(self) -> None:
        v = self.verdict([], 50)
        assert (v.tokens, v.kept.tolist(), v.path.tolist(), v.num_accepted) == ([50], [0], [], 0)

    def test_pending_rows_come_first(self) -> None:
        assert self.verdict([2], 50, pending=3).kept.tolist() == [0, 1, 2, 4]

    @pytest.mark.parametrize(
        ("eos", "tokens", "kept", "accepted", "reason"),
        [
            (11, [11], [0], 1, "stop"), (13, [11, 13], [0, 1], 2, "stop"), (14, [11, 13, 14], [0, 1, 3], 3, "stop"),
            (50, [11, 13, 14, 50], [0, 1, 3, 4], 3, "stop"), (12, [11, 13, 14, 50], [0, 1, 3, 4], 3, None),
        ],
    )  # fmt: skip
    def test_cropped_at_eos(self, eos: int, tokens: list[int], kept: list[int], accepted: int, reason: Any) -> None:
        v = self.verdict([1, 3, 4], 50, eos=[eos])
        assert (v.tokens, v.kept.tolist(), v.num_accepted, v.finish_reason) == (tokens, kept, accepted, reason)
        assert v.path.tolist() == [1, 3, 4][:accepted]

    @pytest.mark.parametrize("most", [1, 2, 3, 4])
    def test_cropped_at_the_length(self, most: int) -> None:
        v = self.verdict([1, 3, 4], 50, most=most)
        assert v.tokens == [11, 13, 14, 50][:most]
        assert v.finish_reason == "length"
        assert len(v.kept) == most

    def test_an_eos_within_the_length_wins(self) -> None:
        assert self.verdict([1, 3, 4], 50, most=2, eos=[13]).finish_reason == "stop"

    def test_paths(self) -> None:
        result = self.answer()
        assert accepted_paths(result, MatchVerifier(), self.TREES, 9) == [([1, 3], 7), ([], 8)]

    TREES = stack_trees([([5, 6, 7, 8], [-1, 0, 0, 1]), ([5], [-1])])

    @staticmethod
    def answer(**change: Any) -> VerifyResult:
        parts = {
            "path": torch.tensor([[1, 3, -1], [-1, -1, -1]]),
            "num_accepted": torch.tensor([2, 0]),
            "next_token_ids": torch.tensor([7, 8]),
        }
        return VerifyResult(**{**parts, **change})

    @pytest.mark.parametrize(
        "result",
        [
            None,
            (1, 2),
            answer(next_token_ids=torch.tensor([7, 9])),
            answer(next_token_ids=torch.tensor([-1, 8])),
            answer(next_token_ids=torch.tensor([7])),
            answer(num_accepted=torch.tensor([-1, 0])),
            answer(num_accepted=torch.tensor([4, 0])),
            answer(num_accepted=torch.tensor([2, 1])),
            answer(path=torch.tensor([[1, 2, -1], [-1, -1, -1]])),  # not one below the other
            answer(path=torch.tensor([[1, 99, -1], [-1, -1, -1]])),
            answer(path=torch.tensor([[1, 3, -1]])),
        ],
    )
    def test_a_verifiers_answer_is_checked(self, result: Any) -> None:
        with pytest.raises(ConfigError, match="verifier 'match' returned"):
            accepted_paths(result, MatchVerifier(), self.TREES, 9)


def test_several_rules_in_one_step() -> None:
    """Greedy, seeded and unseeded requests side by side: each as if it were alone."""
    model, draft = model_of(named("llama")), model_of(named("qwen2"))
    kinds = [GREEDY, SEEDED, FREE, SEEDED, GREEDY]

    def run(members: Sequence[int]) -> list[Request]:
        engine = engine_of(model, "draft_model", {"model": draft}, runner=private_runner(model))
        torch.manual_seed(2)
        requests = [add(engine, PROMPTS[i], 15, sampling=kinds[i]) for i in members]
        drain(engine)
        return requests

    together = run(range(5))
    assert all(r.stats.num_draft_tokens > 0 and r.stats.num_rejected_drafts == 0 for r in together)
    assert together[0].new_tokens == reference(model, PROMPTS[0], 15)
    assert together[4].new_tokens == reference(model, PROMPTS[4], 15)
    for i in range(5):
        alone = run([i])[0]
        assert alone.tokens == together[i].tokens
        assert alone.stats.accepted_at == together[i].stats.accepted_at


def test_a_rule_chosen_by_object_or_name_stands_everywhere() -> None:
    for rule in ("rejection", RejectionVerifier()):
        choice = build_verifiers(rule)
        assert {choice.of(s, samples).name for s in (GREEDY, SEEDED, FREE) for samples in (True, False)} == {
            "rejection"
        }


def test_verifiers_are_asked_for_their_own_rows_only() -> None:
    """With two rules, each sees a sub-batch whose noise and rows belong to it."""
    asked: list[tuple[str, list[int], int]] = []

    class Match(MatchVerifier):
        def verify(self, tree: TokenTree, target: Any, noise: KeyedNoise) -> VerifyResult:
            asked.append(("match", tree.token_ids[:, 0].tolist(), len(noise._positions)))
            return super().verify(tree, target, noise)

    class Rejection(RejectionVerifier):
        def verify(self, tree: TokenTree, target: Any, noise: KeyedNoise) -> VerifyResult:
            asked.append(("rejection", tree.token_ids[:, 0].tolist(), len(noise._positions)))
            return super().verify(tree, target, noise)

    model = model_of(named("llama"))
    engine = engine_of(model, "draft_model", {"model": model_of(named("qwen2"))}, runner=private_runner(model))
    match = Match()
    engine.verifiers = VerifierChoice(greedy=match, seeded=match, sampled=Rejection())
    requests = [add(engine, p, 6, sampling=s) for p, s in zip(PROMPTS, (GREEDY, FREE, SEEDED), strict=False)]
    engine.step()
    roots = [r.tokens[-1] for r in requests]
    asked.clear()
    engine.step()
    assert sorted(asked) == [("match", [roots[0], roots[2]], 2), ("rejection", [roots[1]], 1)]


def test_two_engines_over_one_runner_take_turns() -> None:
    """They share the cache, and each has a drafter of its own."""
    model = model_of(named("llama"))
    used = engine_of(model).target.cache._pool.num_used
    for drafter in ("ngram", "oracle", "self_int8"):
        engines = [engine_of(model, drafter) for _ in range(2)]
        assert engines[0].target is engines[1].target
        assert engines[0].drafter is not engines[1].drafter
        requests = [add(engines[i % 2], prompt, 15) for i, prompt in enumerate(PROMPTS)]
        while any(e.has_unfinished for e in engines):
            for engine in engines:
                engine.step()
                engine.target.cache.check_integrity()
        assert [r.new_tokens for r in requests] == [reference(model, p, 15) for p in PROMPTS]
    assert engines[0].target.cache._pool.num_used == used


def test_more_prompts_than_places() -> None:
    model = model_of(named("llama"))
    rows = prompts(*[2 + i % 9 for i in range(100)], seed=4)
    llm = specdec.LLM(model, drafter="ngram")
    completions = llm.generate(rows, max_new_tokens=6)
    assert [c.token_ids for c in completions] == [reference(model, row, 6) for row in rows]


def test_threads_at_the_same_time() -> None:
    """One model, a runner per thread; nothing is shared but the weights."""
    model = build(named("gemma3"))
    want = [reference(model, prompt, 20) for prompt in PROMPTS]
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        try:
            drafter = ["oracle", "ngram", "random", "none", "self_int8"][i]
            out = specdec.generate(model, one(PROMPTS[i]), max_new_tokens=20, do_sample=False, drafter=drafter)
            results[i] = out[0, len(PROMPTS[i]) :].tolist()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(5)] == want
