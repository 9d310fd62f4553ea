"""Faults 8, 9 and 18: KV that is out of step gives right output and quietly lower acceptance, so KV is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.drafters import draft_model
from specdec.engine import Engine
from specdec.interfaces import DraftRequest, SamplingParams, TokenTree
from specdec.request import Request
from tests.decoding import add, assert_fresh_kv, engine_of, prompts, reference
from tests.models.architectures import SUPPORTED, model_of, named
from tests.odd_drafters import KnownTrees, Wrapped

PROMPTS = prompts(3, 7, 12)
WINDOWED = [a.name for a in SUPPORTED if a.windowed]


class Corruption:
    """Makes the draft token at a depth that rotates through `depths` wrong; 0 leaves the draft alone."""

    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = depths
        self.step = 0
        self.expected: dict[int, int] = {}

    def __call__(self, tree: TokenTree, requests: Sequence[DraftRequest]) -> TokenTree:
        token_ids = tree.token_ids.clone()
        for row, request in enumerate(requests):
            depth = self.depths[(self.step + row) % len(self.depths)]
            drafted = int(tree.num_nodes[row]) - 1
            self.expected[request.request_id] = drafted
            if 0 < depth <= drafted:
                token_ids[row, depth] = (token_ids[row, depth] + 1) % 64
                self.expected[request.request_id] = depth - 1
        self.step += 1
        return replace(tree, token_ids=token_ids)


def check_all_kv(engine: Engine, requests: Sequence[Request], draft_runner: Any) -> None:
    for request in requests:
        if request.finish_reason is None and request.num_computed:
            assert_fresh_kv(engine.target, request.request_id, request.tokens)
            if draft_runner is not None and draft_runner.cache.is_open(request.request_id):
                assert draft_runner.cache.context_len(request.request_id) <= len(request.tokens)
                assert_fresh_kv(draft_runner, request.request_id, request.tokens)
    engine.target.cache.check_integrity()
    if draft_runner is not None:
        draft_runner.cache.check_integrity()


def trace(engine: Engine, drafter: Any, corruption: Corruption, rows: Sequence[list[int]]) -> list[Any]:
    """Run requests to the end; return what each step emitted and accepted, by row."""
    requests = [add(engine, row, 24) for row in rows]
    order = {r.request_id: i for i, r in enumerate(requests)}
    corruption.step = 0
    steps: list[Any] = []
    while engine.has_unfinished:
        corruption.expected.clear()
        outputs = engine.step()
        check_all_kv(engine, requests, getattr(drafter, "_runner", None))
        for output in outputs:
            assert output.num_accepted == corruption.expected.get(output.request_id, 0)
        steps.append([(order[o.request_id], o.token_ids, o.num_accepted) for o in outputs])
    return steps


@pytest.mark.parametrize("depths", [[0], [1], [4], [0, 1, 0, 3, 2, 4, 0, 0]], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral_window", "deepseek_v3"])
def test_fault_08_a_draft_model_equal_to_the_target(name: str, depths: list[int]) -> None:
    """Accepts everything up to the forced error, at every step; both caches stay fresh; a second run is the same."""
    model = model_of(named(name))
    engine = engine_of(model, "draft_model", {"model": model}, max_draft_tokens=4)
    inner, corruption = engine.drafter, Corruption(depths)
    engine.drafting.drafter = Wrapped(inner, corruption)
    first = trace(engine, inner, corruption, PROMPTS)
    assert trace(engine, inner, corruption, PROMPTS) == first
    for i, prompt in enumerate(PROMPTS):
        got = [t for step in first for row, tokens, _ in step if row == i for t in tokens]
        assert got == reference(model, prompt, 24)


def test_fault_08_a_draft_model_catches_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache begins small and moves to longer runs; long tails of unknown tokens are read in chunks."""
    monkeypatch.setattr(draft_model, "_CHUNK_TOKENS", 4)
    monkeypatch.setattr(draft_model, "_FIRST_RUN_TOKENS", 3)
    model = model_of(named("qwen3"))
    engine = engine_of(model, "draft_model", {"model": model}, max_draft_tokens=3)
    requests = [add(engine, prompt, 40) for prompt in prompts(3, 23, 9)]
    for step in range(100):
        # Now and then several steps go by without drafts.
        engine._scheduler.max_draft_tokens = 0 if step % 11 > 4 else 3
        engine.step()
        check_all_kv(engine, requests, engine.drafter._runner)
        if not engine.has_unfinished:
            break
    assert [r.new_tokens for r in requests] == [reference(model, p, 40) for p in prompts(3, 23, 9)]
    assert all(r.stats.acceptance_rate == 1.0 for r in requests)


@pytest.mark.parametrize("drafter", ["draft_model", "oracle"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=5)], ids=["greedy", "match"]
)
def test_fault_08_full_acceptance(sampling: SamplingParams, drafter: str) -> None:
    model = model_of(named("llama"))
    options = {"model": model} if drafter == "draft_model" else {}
    engine = engine_of(model, drafter, options, max_draft_tokens=4)
    requests = [add(engine, prompt, 21, sampling=sampling) for prompt in PROMPTS]
    while engine.has_unfinished:
        engine.step()
    for request in requests:
        assert request.stats.acceptance_rate == 1.0
        assert request.stats.num_steps == 4


def test_fault_08_accepted_drafts_keep_their_kv() -> None:
    """Recomputing them would be right too, and slow: the draft model reads no accepted token twice."""
    model = model_of(named("llama"))
    engine = engine_of(model, "draft_model", {"model": model}, max_draft_tokens=4)
    request = add(engine, PROMPTS[1], 40)
    engine.step()
    for _ in range(5):
        engine.step()
        # All but the last draft, which is never run, and the next token.
        assert engine.drafter._runner.cache.context_len(request.request_id) == len(request.tokens) - 2


def test_fault_08_full_acceptance_by_rejection() -> None:
    model = model_of(named("llama"))
    engine = engine_of(model, "draft_model", {"model": model}, max_draft_tokens=4)
    torch.manual_seed(0)
    requests = [add(engine, prompt, 21, sampling=SamplingParams(temperature=1.0, top_k=20)) for prompt in PROMPTS]
    while engine.has_unfinished:
        engine.step()
    assert [request.stats.acceptance_rate for request in requests] == [1.0] * 3


@pytest.mark.parametrize("drafter", ["scripted", "tree", "draft_model"])
@pytest.mark.parametrize("name", WINDOWED)
def test_fault_09_rejections_across_a_window(name: str, drafter: str) -> None:
    """Window 8, K 4: nothing of a window is lost when what lay behind it is rejected."""
    model = model_of(named(name))
    options: dict[str, Any] = {
        "scripted": {"accept_counts": [0, 3, 1, 4]},
        "tree": {"accept_counts": [2, 0, 1], "width": 2},
        "draft_model": {"model": model_of(named("llama"))},
    }
    kind = "scripted" if drafter == "tree" else drafter
    engine = engine_of(model, kind, options[drafter], max_draft_tokens=4)
    requests = [add(engine, prompt, 20) for prompt in prompts(5, 6, 7)]
    while engine.has_unfinished:
        engine.step()
        check_all_kv(engine, requests, getattr(engine.drafter, "_runner", None) if kind == "draft_model" else None)
    assert [r.new_tokens for r in requests] == [reference(model, prompt, 20) for prompt in prompts(5, 6, 7)]


class TestFault18Trees:
    """Random trees with the truth anywhere in them."""

    def run(self, name: str, seed: int, **options: Any) -> list[Request]:
        model = model_of(named(name))
        texts = [prompt + reference(model, prompt, 24) for prompt in PROMPTS]
        engine = engine_of(model, KnownTrees(texts, seed, **options), max_draft_tokens=12)
        requests = [add(engine, prompt, 20) for prompt in PROMPTS]
        while engine.has_unfinished:
            engine.step()
            check_all_kv(engine, requests, None)
        assert [r.tokens for r in requests] == [text[:-4] for text in texts]
        assert sum(r.stats.num_rejected_drafts for r in requests) == 0
        return requests

    @pytest.mark.parametrize("duplicates", [False, True])
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "llama4"])
    def test_fault_18_random_trees(self, name: str, seed: int, duplicates: bool) -> None:
        requests = self.run(name, seed, duplicates=duplicates)
        assert all(r.stats.num_accepted_tokens >= 5 for r in requests)

    @pytest.mark.parametrize("seed", range(4))
    def test_fault_18_the_order_of_siblings_does_not_matter(self, seed: int) -> None:
        one, other = (self.run("llama", seed, reverse=reverse) for reverse in (False, True))
        for left, right in zip(one, other, strict=True):
            assert left.stats.accepted_at == right.stats.accepted_at
            assert left.stats.num_draft_tokens == right.stats.num_draft_tokens

    @pytest.mark.parametrize("width", [2, 3])
    def test_fault_18_the_true_path_is_found_at_every_place(self, width: int) -> None:
        model = model_of(named("qwen3"))
        engine = engine_of(model, "oracle", {"width": width}, max_draft_tokens=3 * width)
        requests = [add(engine, prompt, 21) for prompt in PROMPTS]
        while engine.has_unfinished:
            engine.step()
            check_all_kv(engine, requests, None)
        for request, prompt in zip(requests, PROMPTS, strict=True):
            assert request.new_tokens == reference(model, prompt, 21)
            # While more than 3 * width tokens are to come; then fewer nodes fit.
            assert [n for _, n in request.stats.emissions[1:4]] == [4, 4, 4]
