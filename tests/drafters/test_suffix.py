"""The suffix drafter: what it proposes, that it is never misled by what did not happen, and what sharing gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.build import build_drafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.interfaces import DraftRequest, Observation, SamplingParams
from specdec.noise import KeyedNoise
from tests.decoding import add, drain, engine_of, prompts
from tests.drafters.looping import looping_model
from tests.drafters.test_suffix_tree import assert_counts
from tests.models.architectures import model_of, named

NOISE = KeyedNoise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(1).bool())
ID = 5


def hear(drafter: SuffixDrafter, start: int, tokens: Sequence[int], path: Sequence[int] | None = None) -> None:
    chosen = None if path is None else torch.tensor(path, dtype=torch.int64)
    drafter.observe([Observation(ID, start, torch.tensor(tokens, dtype=torch.int64), path=chosen)])


def proposed(drafter: SuffixDrafter, text: Sequence[int], most: int = 8, **options: Any) -> tuple[list[int], list[int]]:
    request = DraftRequest(ID, text[-1], len(text) - 1, most, SamplingParams(), **options)
    tree = drafter.propose([request], NOISE)
    n = int(tree.num_nodes[0])
    return tree.token_ids[0, 1:n].tolist(), tree.parents[0, 1:n].tolist()


def after(text: Sequence[int], most: int = 8, **options: Any) -> tuple[list[int], list[int]]:
    """Return what a drafter with these options proposes after one text."""
    drafter = SuffixDrafter(**options)
    hear(drafter, 0, text)
    return proposed(drafter, text, most)


def test_a_match_of_n_tokens_is_worth_n_draft_tokens() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 2, 3, 4]
    assert after(text) == ([5, 6, 7], [0, 1, 2])
    assert after(text, factor=2.0)[0] == [5, 6, 7, 8, 9, 30]
    assert after(text, factor=0.0, offset=1.0)[0] == [5]
    assert after(text, most=2)[0] == [5, 6]
    assert after(text, factor=0.0)[0] == []


def test_nothing_is_proposed_where_nothing_matches() -> None:
    assert after([1, 2, 3, 4]) == ([], [])
    assert after([1]) == ([], [])


def test_the_more_frequent_continuation_wins_and_rare_ones_end_a_draft() -> None:
    text = [1, 5, 1, 5, 1, 6, 1]
    assert after(text, factor=4.0, min_token_prob=0.5)[0] == [5, 1]
    assert after(text, factor=4.0, min_token_prob=0.7)[0] == []


def test_a_longer_match_that_says_less_loses() -> None:
    text = [9, 1, 2, 9, 1, 3, *[1, 4, 4] * 8, 9, 1]
    # After 9 1: once 2, once 3. After 1 alone: 4 in eight of ten. One token of 0.8 scores more than one of 0.5, but
    # less than two.
    assert after(text, factor=0.0, offset=1.0)[0] == [4]
    assert after(text, factor=1.0)[0] == [3, 1]


def test_confidence_ends_a_chain_behind_the_token_that_fell_short() -> None:
    drafter = SuffixDrafter(factor=8.0, min_token_prob=0.0)
    text = [1, 2, 3, 1, 2, 4, 1]
    hear(drafter, 0, text)
    assert proposed(drafter, text, min_confidence=0.4)[0][:2] == [2, 4]
    assert proposed(drafter, text, min_confidence=0.6)[0] == [2, 4]
    assert len(proposed(drafter, text, min_confidence=0.4)[0]) > 2


def test_a_tree_holds_the_likeliest_nodes_wherever_they_hang() -> None:
    text = [1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 3, 7, 9, 1]
    # After 1: always 2. Then 3 and 7 with 2/3, and with 1/3 each 4 instead of 3, and 9 and 1 behind 7.
    token_ids, parents = after(text, tree=True, factor=8.0, min_token_prob=0.0, most=5)
    assert token_ids == [2, 3, 7, 4, 9]
    assert parents == [0, 1, 2, 1, 3]
    assert after(text, tree=True, factor=8.0, min_token_prob=0.5) == ([2, 3, 7], [0, 1, 2])
    wide = after([1, 2, 1, 3, 1, 4, 1], tree=True, factor=3.0, min_token_prob=0.0, most=3)
    assert sorted(wide[0]) == [2, 3, 4]
    assert wide[1] == [0, 0, 0]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1, max_size=8), st.booleans()), max_size=10
    )
)
def test_counts_are_those_of_the_text_as_it_is_known(turns: list[tuple[int, list[int], bool]]) -> None:
    """Tokens are told, told again and told otherwise; only what stands counts."""
    drafter, text = SuffixDrafter(max_depth=4), [0]
    hear(drafter, 0, text)
    for back, tokens, drafts in turns:
        start = max(0, len(text) - back)
        text = text[:start] + tokens
        hear(drafter, start, tokens)
        if drafts:
            proposed(drafter, text)
            assert_counts(drafter._own[ID], [text])
            hear(drafter, start, tokens)
            assert proposed(drafter, text) == proposed(fresh(text), text)


def fresh(text: Sequence[int]) -> SuffixDrafter:
    drafter = SuffixDrafter(max_depth=4)
    hear(drafter, 0, text)
    return drafter


def test_sharing_learns_what_a_finished_request_said() -> None:
    drafter = SuffixDrafter(share=True, factor=4.0)
    hear(drafter, 0, [1, 2, 3, 40], path=[])  # a prompt of three tokens and the first new one
    hear(drafter, 4, [41, 42, 43], path=[1, 2])
    drafter.release(ID)
    hear(drafter, 0, [8, 9, 40], path=[])
    assert proposed(drafter, [8, 9, 40])[0] == []  # the same request come back: it has not ended
    drafter.release(ID)
    drafter.observe([Observation(ID + 1, 0, torch.tensor([7, 41]), path=torch.tensor([], dtype=torch.int64))])
    hear(drafter, 0, [8, 9, 40], path=[])
    assert proposed(drafter, [8, 9, 40])[0] == []


def test_a_second_request_drafts_from_the_first_ones_output() -> None:
    for share in (False, True):
        drafter = SuffixDrafter(share=share, factor=4.0)
        hear(drafter, 0, [1, 2, 3, 40], path=[])
        hear(drafter, 4, [41, 42, 43, 1], path=[1, 2])
        drafter.release(ID)
        text = [2, 40]
        request = DraftRequest(ID + 1, 40, 1, 8, SamplingParams())
        drafter.observe([Observation(ID + 1, 0, torch.tensor(text), path=torch.tensor([], dtype=torch.int64))])
        tree = drafter.propose([request], NOISE)
        assert tree.token_ids[0].tolist() == ([40, 41, 42, 43, 1] if share else [40])
        drafter.observe([Observation(ID + 1, 2, torch.tensor([2]))])  # the prompt's tokens were not learned
        again = drafter.propose([replace(request, root_token_id=2, root_position=2)], NOISE)
        assert again.token_ids[0].tolist() == [2, 40, 2]  # of its own text
        drafter.reset()
        drafter.release(ID + 1)
        drafter.reset()
        drafter.observe([Observation(ID + 2, 0, torch.tensor([41]))])
        none = drafter.propose([DraftRequest(ID + 2, 41, 0, 8, SamplingParams())], NOISE)
        assert none.token_ids.tolist() == [[41]]


PROMPT = prompts(12)[0]


def acceptance(options: dict[str, Any], runs: int, num_new: int = 40) -> list[float]:
    """Return the acceptance lengths of the same prompt, one run after another, with one drafter."""
    engine = engine_of(model_of(named("llama")), "suffix", options, max_draft_tokens=8)
    lengths = []
    for _ in range(runs):
        request = add(engine, PROMPT, num_new)
        drain(engine)
        lengths.append(request.stats.acceptance_length or 0.0)
        engine.forget(request.request_id)
    return lengths


@pytest.mark.parametrize("tree", [False, True])
def test_sharing_pays_on_the_second_identical_prompt(tree: bool) -> None:
    alone, alone_again = acceptance({"tree": tree}, 2)
    assert alone_again == alone
    first, second, third = acceptance({"tree": tree, "share": True}, 3)
    assert first == alone
    assert second > 2 * first
    assert third >= second - 0.5


@pytest.mark.parametrize("tree", [False, True])
def test_repetitive_text_is_accepted_nearly_whole(tree: bool) -> None:
    engine = engine_of(looping_model(), "suffix", {"tree": tree}, max_draft_tokens=8)
    request = add(engine, [3], 200)
    drain(engine)
    assert request.new_tokens[:9] == [4, 5, 6, 7, 0, 1, 2, 3, 4]
    assert request.stats.acceptance_rate == 1.0
    assert request.stats.num_steps < 8 + 4 + 200 / 9


def test_a_failed_step_is_not_learned_from() -> None:
    """A step fails after the drafter heard of it: it is told to release the requests and hears of them anew."""
    engine = engine_of(looping_model(), "suffix", {"share": True}, max_draft_tokens=4)
    requests = [add(engine, [3], 30), add(engine, [60], 30)]
    for _ in range(3):
        engine.step()
    count, engine._count = engine._count, None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        engine.step()
    engine._count = count  # type: ignore[method-assign]
    drain(engine)
    drafter: Any = engine.drafter
    drafter.observe([])
    assert drafter._cache.num_tokens == 60
    assert_counts(drafter._cache.tree, [r.new_tokens for r in requests])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_depth": 1}, "max_depth=1; allowed: an integer >= 2"),
        ({"max_depth": 2.5}, "max_depth=2.5"),
        ({"factor": -1}, "factor=-1"),
        ({"offset": "1"}, "offset='1'"),
        ({"min_token_prob": 1.5}, "min_token_prob=1.5; allowed: 0 to 1"),
        ({"tree": "eagle"}, "tree='eagle'; allowed: True, False"),
        ({"share": 1}, "share=1"),
        ({"share": True, "max_cached_tokens": 0}, "max_cached_tokens=0"),
        ({"max_cached_tokens": 10}, "no effect without share=True"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_drafter("suffix", engine_of(model_of(named("llama"))).target, None, options)


def test_trees_for_a_target_of_chains_are_refused() -> None:
    runner = engine_of(model_of(named("llama"))).target.with_own_cache()
    runner.supports_trees = False
    with pytest.raises(IncompatibleDrafterError, match="tree=True, but this target's attention runs chains only"):
        build_drafter("suffix", runner, None, {"tree": True})
    build_drafter("suffix", runner, None, {})
