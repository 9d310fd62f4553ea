"""Token recycling: what is learned, what is drafted from it, and that it is forgotten only when told to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.build import build_drafter
from specdec.drafters.static_tree import static_tree
from specdec.drafters.token_recycling import TokenRecyclingDrafter
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.interfaces import DraftRequest, Observation, SamplingParams
from specdec.noise import KeyedNoise
from tests.decoding import add, drain, engine_of, prompts
from tests.drafters.looping import looping_model
from tests.models.architectures import model_of, named

NOISE = KeyedNoise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(1).bool())


def learn(drafter: TokenRecyclingDrafter, rows: dict[int, list[int]]) -> None:
    scored, top = torch.tensor(list(rows)), torch.tensor(list(rows.values()))
    drafter.observe([Observation(1, 0, torch.tensor([1]), scored_token_ids=scored, top_token_ids=top)])


def proposed(drafter: TokenRecyclingDrafter, *asked: tuple[int, int]) -> list[tuple[list[int], list[int]]]:
    requests = [DraftRequest(i, root, 0, most, SamplingParams()) for i, (root, most) in enumerate(asked)]
    tree = drafter.propose(requests, NOISE)
    sizes = tree.num_nodes.tolist()
    return [(tree.token_ids[i, 1:n].tolist(), tree.parents[i, 1:n].tolist()) for i, n in enumerate(sizes)]


def test_children_are_the_candidates_of_the_last_time() -> None:
    drafter = TokenRecyclingDrafter(64, static_tree([[0], [1], [0, 0], [1, 1]]), top_k=2)
    learn(drafter, {1: [2, 3], 2: [4, 5], 3: [6, 7]})
    assert proposed(drafter, (1, 9)) == [([2, 3, 4, 7], [0, 0, 1, 2])]
    learn(drafter, {1: [3, 2]})
    assert proposed(drafter, (1, 9)) == [([3, 2, 6, 5], [0, 0, 1, 2])]
    assert proposed(drafter, (1, 3), (2, 1), (9, 4)) == [([3, 2, 6], [0, 0, 1]), ([4], [0]), ([], [])]


def test_unknown_tokens_have_no_children_and_leave_their_room() -> None:
    drafter = TokenRecyclingDrafter(64, static_tree([[0], [0, 0], [0, 0, 0], [1], [1, 0]]), top_k=2)
    assert proposed(drafter, (1, 9)) == [([], [])]
    learn(drafter, {1: [2, 3], 3: [1, 4]})
    assert proposed(drafter, (1, 3)) == [([2, 3, 1], [0, 0, 2])]


def test_the_last_row_of_a_token_wins() -> None:
    drafter = TokenRecyclingDrafter(64, None, top_k=2)
    scored, top = torch.tensor([1, 2, 1]), torch.tensor([[5, 6], [7, 8], [9, 10]])
    drafter.observe([Observation(1, 0, torch.tensor([1]), scored_token_ids=scored, top_token_ids=top)])
    assert proposed(drafter, (1, 1), (2, 1)) == [([9], [0]), ([7], [0])]


def test_chains_follow_the_likeliest_candidate() -> None:
    drafter = TokenRecyclingDrafter(64, None, top_k=2)
    learn(drafter, {1: [2, 3], 2: [1, 5]})
    assert proposed(drafter, (1, 4), (2, 2), (3, 5)) == [([2, 1, 2, 1], [0, 1, 2, 3]), ([1, 2], [0, 1]), ([], [])]


def test_nothing_is_allocated_before_there_is_something_to_learn_and_reset_forgets() -> None:
    drafter = TokenRecyclingDrafter(64, None, top_k=2)
    drafter.observe([Observation(1, 0, torch.tensor([1, 2]))])
    assert drafter._after is None
    learn(drafter, {1: [2, 3]})
    assert drafter._after is not None
    assert (drafter._after.shape, drafter._after.dtype) == ((64, 2), torch.int32)
    drafter.release(1)
    assert proposed(drafter, (1, 1)) == [([2], [0])]
    drafter.reset()
    assert proposed(drafter, (1, 1)) == [([], [])]


@pytest.mark.parametrize("tree", [None, [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [1]]], ids=["chain", "tree"])
def test_a_circle_is_accepted_whole_after_one_round(tree: Any) -> None:
    engine = engine_of(looping_model(), "token_recycling", {"tree": tree}, max_draft_tokens=5)
    depth = 5 if tree is None else 4
    request = add(engine, [3], 108)
    drain(engine)
    assert request.new_tokens[:9] == [4, 5, 6, 7, 0, 1, 2, 3, 4]
    assert request.stats.num_steps <= 8 + 100 // (depth + 1) + 1
    again = add(engine, [2], 61)  # the prompt's step says 3
    drain(engine)
    assert again.stats.num_steps == -(-60 // (depth + 1))


def test_rejected_drafts_teach_too() -> None:
    """All rows that the target computes are learned from, those of wrong siblings included."""
    engine = engine_of(model_of(named("llama")), "token_recycling", {"tree": [3, 2]}, max_draft_tokens=9)
    request = add(engine, prompts(5)[0], 40)
    drain(engine)
    drafter: Any = engine.drafter
    known = (drafter._after[:, 0] >= 0).sum()
    assert request.stats.num_draft_tokens > request.stats.num_accepted_tokens
    assert int(known) > len(set(request.tokens))


def test_the_tree_is_as_wide_as_there_are_candidates() -> None:
    runner = engine_of(model_of(named("llama"))).target
    narrow: Any = build_drafter("token_recycling", runner, None, {"top_k": 2})
    assert narrow._tree.width == 2
    paper: Any = build_drafter("token_recycling", runner, None, {})
    assert len(paper._tree) == 80
    assert paper.features.top_k == 8
    with pytest.raises(ConfigError, match="4 children at a node and top_k=2"):
        build_drafter("token_recycling", runner, None, {"top_k": 2, "tree": "eagle"})


@pytest.mark.parametrize("top_k", [0, 65, True, "8", 2.0])
def test_top_k_out_of_range_is_refused(top_k: Any) -> None:
    with pytest.raises(ConfigError, match=r"top_k=.*; allowed: an integer from 1 to the vocabulary's 64"):
        build_drafter("token_recycling", engine_of(model_of(named("llama"))).target, None, {"top_k": top_k})


def test_a_target_of_chains_gets_chains_and_refuses_trees() -> None:
    runner = engine_of(model_of(named("llama"))).target.with_own_cache()
    runner.supports_trees = False
    chains: Any = build_drafter("token_recycling", runner, None, {})
    assert chains._tree is None
    with pytest.raises(IncompatibleDrafterError, match="chains only; use tree=None"):
        build_drafter("token_recycling", runner, None, {"tree": "recycling"})
