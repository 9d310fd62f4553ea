"""Trees that a draft model grows: over its own cache, for one target or many requests, and where they are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from specdec.build import build_drafter
from specdec.engine import Engine
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.interfaces import SamplingParams
from tests.decoding import add, assert_fresh_kv, drain, engine_of, prompts, reference
from tests.models.architectures import build, model_of, named

RAGGED = prompts(1, 3, 12, 2, 7, 5, 9, 4)
SAMPLED = SamplingParams(temperature=1.0, seed=3)
SHAPES: dict[str, dict[str, Any]] = {
    "full": {"tree": [2, 2, 1]},
    "paths": {"tree": [[0], [1], [0, 0], [0, 1], [0, 1, 0], [1, 0]]},
    "preset": {"tree": "eagle"},
    "sampled": {"tree": [3, 1, 1], "sampled": True},
    "dynamic": {"tree": {"depth": 4, "top_k": 3, "total_tokens": 12}},
    "beam": {"tree": {"depth": 3, "top_k": 2, "total_tokens": 13}},
}


@cache
def answers() -> list[list[int]]:
    return [reference(model_of(named("llama")), row, 12) for row in RAGGED]


each = pytest.mark.parametrize("shape", SHAPES)


def engine_with(draft: str, shape: str, target: str = "llama", **options: Any) -> Engine:
    runner = engine_of(model_of(named(target))).target.with_own_cache()
    chosen = {"model": model_of(named(draft)), **SHAPES[shape]}
    return engine_of(model_of(named(target)), "draft_model", chosen, runner=runner, max_draft_tokens=12, **options)


@each
def test_greedy_identity_in_a_ragged_batch(shape: str) -> None:
    engine = engine_with("mistral_window", shape)
    requests = [add(engine, row, 12) for row in RAGGED]
    drain(engine)
    assert [r.new_tokens for r in requests] == answers()
    assert sum(r.stats.num_rejected_drafts for r in requests) == 0


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@each
def test_only_the_accepted_path_keeps_its_kv(shape: str, sampling: SamplingParams) -> None:
    engine = engine_with("mistral_window", shape, "mistral_window")
    drafter: Any = engine.drafter
    requests = [add(engine, row, 30, sampling=sampling) for row in RAGGED[:3]]
    for _ in range(4):
        engine.step()
        own = drafter._runner
        for r in requests:
            if own.cache.is_open(r.request_id):
                assert_fresh_kv(own, r.request_id, r.tokens)
        own.cache.check_integrity()
    accepted, drafted = (sum(getattr(r.stats, f"num_{k}_tokens") for r in requests) for k in ("accepted", "draft"))
    assert 0 < accepted < drafted


@pytest.mark.parametrize(("shape", "depth"), [("full", 3), ("paths", 2), ("sampled", 3)])
def test_the_target_as_its_own_draft_is_right_to_the_depth_of_the_tree(shape: str, depth: int) -> None:
    """The likeliest child comes first; any KV of a wrong row would show. "paths" ends where the likeliest path does."""
    engine = engine_with("llama", shape)
    request = add(engine, RAGGED[2], 40)
    for _ in range(5):  # the first one is the prompt's
        engine.step()
    assert request.stats.num_steps == 4
    assert request.stats.num_accepted_tokens == 4 * depth


def test_a_beam_finds_more_than_its_chain() -> None:
    draft = build(named("llama"))
    draft.lm_head.weight.add_(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 0.5)

    def accepted(top_k: int) -> int:
        chosen = {"model": draft, "tree": {"depth": 3, "top_k": top_k, "total_tokens": 25}}
        engine = engine_of(model_of(named("llama")), "draft_model", chosen, max_draft_tokens=24)
        requests = [add(engine, row, 12) for row in RAGGED[:4]]
        drain(engine)
        return sum(r.stats.num_accepted_tokens for r in requests)

    assert accepted(8) > 1.2 * accepted(1) > 0


@pytest.mark.parametrize("tree", [{"depth": 3, "top_k": 1, "total_tokens": 4}, [1, 1, 1]], ids=str)
def test_a_tree_of_one_branch_is_the_chain(tree: Any) -> None:
    seen = []
    for options in ({"tree": tree}, {"tree": "chain"}):
        chosen = {"model": model_of(named("qwen2")), **options}
        engine = engine_of(model_of(named("llama")), "draft_model", chosen, max_draft_tokens=3)
        requests = [add(engine, row, 8) for row in RAGGED[:2]]
        drain(engine)
        seen.append([(r.stats.num_steps, r.stats.num_draft_tokens, r.stats.num_accepted_tokens) for r in requests])
    assert seen[0] == seen[1]


def test_what_carries_draft_probs() -> None:
    assert engine_with("qwen2", "sampled").drafter.samples
    assert not engine_with("qwen2", "full").drafter.samples
    assert not engine_with("qwen2", "beam").drafter.samples


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"tree": "chian"},
            r"tree='chian'; allowed: 'chain', 'dynamic', a dict of depth, top_k, total_tokens, a name \(eagle",
        ),
        (
            {"tree": {"width": 3}},
            r"tree has no option 'width'; (did you mean 'depth'\?)? ?available: depth, top_k, total_tokens",
        ),
        ({"tree": {"depth": 0}}, r"depth=0; allowed: an integer from 1"),
        ({"tree": [2], "sampled": 1}, r"sampled=1; allowed: True or False"),
        ({"sampled": True}, r"static tree, and a chain is drawn anyway"),
        ({"tree": "dynamic", "sampled": True}, r"the likeliest nodes of a dynamic tree are not drawn"),
    ],
)
def test_what_is_no_tree_is_refused(options: dict[str, Any], complaint: str) -> None:
    runner = engine_of(model_of(named("llama"))).target
    with pytest.raises(ConfigError, match=complaint):
        build_drafter("draft_model", runner, None, {"model": model_of(named("qwen2")), **options})


@pytest.mark.parametrize(("target", "draft", "whose"), [("mpt", "llama", "this target's"), ("llama", "mpt", "draft")])
def test_trees_need_both_models_to_run_them(target: str, draft: str, whose: str) -> None:
    with pytest.raises(IncompatibleDrafterError, match=rf"{whose}.* attention runs chains only; leave tree out"):
        engine_with(draft, "full", target)
