"""Typical and relaxed acceptance: what they keep, that they say they are lossy and are, and that greedy is exact."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.interfaces import SamplingParams, TokenTree, Verifier
from specdec.noise import KeyedNoise
from specdec.tree import stack_trees
from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.relaxed import RelaxedVerifier
from specdec.verifiers.typical import TypicalVerifier
from tests.decoding import add, drain, engine_of, prompts, reference
from tests.models.architectures import model_of, named
from tests.verifiers.enumeration import (
    TableTarget,
    blocks,
    drafts,
    joint_law,
    most_likely,
    random_model,
    step_law,
    target_law,
    total_variation,
    uniform_ends,
)

GENEROUS = [TypicalVerifier(), RelaxedVerifier(relaxed_topk=3, relaxed_delta=0.5)]
RULES = [*GENEROUS, RelaxedVerifier()]
each = pytest.mark.parametrize("verifier", RULES, ids=["typical", "relaxed 3", "relaxed"])


def path_of(verifier: Verifier, tree: TokenTree, table: Tensor) -> list[int]:
    result = verifier.verify(tree, TableTarget(table, tree.token_ids), uniform_ends(low=True))
    next(blocks(tree, result.path, result.num_accepted, result.next_token_ids))
    return result.path[0, : int(result.num_accepted[0])].tolist()


def children_of_the_root(verifier: Verifier, probs: list[float]) -> list[int]:
    """Return which tokens the rule accepts after a distribution, each drafted alone."""
    table = torch.tensor([probs] * len(probs))
    return [t for t in range(len(probs)) if path_of(verifier, stack_trees([([0, t], [-1, 0])]), table)]


def test_typical_accepts_above_its_bar() -> None:
    """min(0.09, 0.3 * exp(-entropy)): the threshold where the target is sure, less where it is not."""
    sure = [0.80, 0.10, 0.08, 0.02]
    assert children_of_the_root(TypicalVerifier(), sure) == [0, 1]
    assert children_of_the_root(TypicalVerifier(posterior_threshold=0.5), sure) == [0]  # 0.3 * exp(-0.69) = 0.15
    flat = [0.0625] * 16
    bar = 0.3 * math.exp(-math.log(16))
    assert bar < 0.0625
    assert children_of_the_root(TypicalVerifier(), flat) == list(range(16))
    assert children_of_the_root(TypicalVerifier(posterior_alpha=1.1), flat) == []
    assert children_of_the_root(TypicalVerifier(posterior_threshold=0.0), [0.5, 0.5, 0.0]) == [0, 1]


def test_relaxed_accepts_candidates_near_the_best() -> None:
    probs = [0.5, 0.25, 0.125, 0.125, 0.0]
    assert children_of_the_root(RelaxedVerifier(), probs) == [0]
    assert children_of_the_root(RelaxedVerifier(relaxed_topk=2), probs) == [0]
    assert children_of_the_root(RelaxedVerifier(relaxed_topk=10, relaxed_delta=0.25), probs) == [0, 1]
    assert children_of_the_root(RelaxedVerifier(relaxed_topk=2, relaxed_delta=0.9), probs) == [0, 1]
    assert children_of_the_root(RelaxedVerifier(relaxed_topk=10, relaxed_delta=0.9), probs) == [0, 1, 2, 3]


def test_the_longest_path_is_kept_and_then_the_likeliest() -> None:
    table = torch.tensor([[0.0, 0.5, 0.3, 0.2], [1.0, 0.0, 0.0, 0.0], [0.0, 0.3, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]])
    rule = TypicalVerifier()
    # 0 -> 1, 2, 3; the likeliest child alone, then with something longer below another one, then two such.
    assert path_of(rule, stack_trees([([0, 3, 1, 2], [-1, 0, 0, 0])]), table) == [2]
    assert path_of(rule, stack_trees([([0, 1, 2, 1], [-1, 0, 0, 2])]), table) == [2, 3]
    assert path_of(rule, stack_trees([([0, 2, 1, 3], [-1, 0, 1, 1])]), table) == [1, 3]
    assert path_of(rule, stack_trees([([0, 2, 1, 3, 0], [-1, 0, 1, 1, 2])]), table) == [1, 2, 4]
    assert path_of(rule, stack_trees([([0, 1, 1], [-1, 0, 0])]), table) == [1], "the first of equal ones"


def test_rows_of_a_ragged_batch_do_not_touch_each_other() -> None:
    table = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    trees = [([0], [-1]), ([1, 2], [-1, 0]), ([2, 0, 3, 1], [-1, 0, 0, 1]), ([3, 1, 2, 0, 3], [-1, 0, 1, 2, 3])]
    seeds = torch.arange(len(trees))
    for verifier in GENEROUS:
        together = answers(verifier, stack_trees(trees), table, seeds)
        alone = [answers(verifier, stack_trees([t]), table, seeds[i : i + 1])[0] for i, t in enumerate(trees)]
        assert together == alone
        assert len({len(block) for block in together}) > 2


def answers(verifier: Verifier, tree: TokenTree, table: Tensor, seeds: Tensor) -> list[tuple[int, ...]]:
    noise = KeyedNoise(seeds, seeds * 7, torch.zeros_like(seeds, dtype=torch.bool))
    result = verifier.verify(tree, TableTarget(table, tree.token_ids), noise)
    return list(blocks(tree, result.path, result.num_accepted, result.next_token_ids))


@each
def test_it_changes_the_distribution_and_says_so(verifier: Verifier) -> None:
    assert not verifier.lossless
    model = random_model(seed=3, vocab_size=3)

    def step(context: int) -> dict[tuple[int, ...], Fraction]:
        return step_law(verifier, model, drafts(model, context, [2, 1], most_likely), False, point_masses=True).blocks

    law = joint_law(model, step, 0, 4)
    assert sum(law.values()) == 1
    assert total_variation(law, target_law(model, 0, 4)) > Fraction(1, 100)


@each
@pytest.mark.parametrize("knows_top", [True, False])
def test_one_hot_targets_are_matched(verifier: Verifier, knows_top: bool) -> None:
    table = torch.eye(5)[torch.randperm(5, generator=torch.Generator().manual_seed(2))]
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 6]
    dice = torch.Generator().manual_seed(1)
    tree = stack_trees([(torch.randint(0, 5, (9,), generator=dice), parents) for _ in range(300)])
    target, noise = TableTarget(table, tree.token_ids, greedy=knows_top), uniform_ends(low=True)
    found, expected = (
        list(blocks(tree, r.path, r.num_accepted, r.next_token_ids))
        for r in (rule.verify(tree, target, noise) for rule in (verifier, MatchVerifier()))
    )
    assert len(Counter(map(len, expected))) > 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[: len(theirs)] == theirs, "of siblings with one token the longer path may be kept"


@pytest.mark.parametrize("verifier", GENEROUS, ids=["typical", "relaxed 3"])
def test_at_temperature_zero_the_output_is_the_targets(verifier: Verifier) -> None:
    """A ragged batch of eight, every second request sampled, so that greedy rows are judged by the rule itself."""
    model, texts = model_of(named("llama")), prompts(1, 3, 5, 8, 13, 2, 7, 11)
    engine = engine_of(model, "oracle", {"width": 2}, verifier=verifier)
    how: list[dict[str, Any]] = [{}, {"sampling": SamplingParams(temperature=1.0, seed=1)}]
    requests = [add(engine, text, 10, **how[i % 2]) for i, text in enumerate(texts)]
    drain(engine)
    for i in range(0, 8, 2):
        assert requests[i].new_tokens == reference(model, texts[i], 10)


@pytest.mark.parametrize("name", ["typical", "relaxed"])
def test_it_is_chosen_by_name_and_labelled(name: str) -> None:
    llm = LLM(model_of(named("llama")), drafter="oracle", verifier=name)
    assert not llm.engine.verifiers.sampled.lossless
    assert len(llm.generate([3, 4, 5], max_new_tokens=5, temperature=1.0, ignore_eos=True)[0].token_ids) == 5


BAD = [
    (TypicalVerifier, "posterior_threshold", [-0.1, 1.0, True, "high", float("nan")]),
    (TypicalVerifier, "posterior_alpha", [0.0, -1, float("inf"), None, float("nan")]),
    (RelaxedVerifier, "relaxed_topk", [0, 1.5, True, "all"]),
    (RelaxedVerifier, "relaxed_delta", [-0.1, 1.0, True, float("nan")]),
]


@pytest.mark.parametrize(("kind", "option", "values"), BAD)
def test_options_out_of_range_are_refused(kind: Any, option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"{option}=.*allowed: "):
            kind(**{option: value})
