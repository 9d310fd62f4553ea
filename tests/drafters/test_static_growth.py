"""Trees of a fixed shape grown by a model: likeliest tokens, and draws whose law the rejection rule keeps exact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from specdec.drafters.autoregression import draw_chain
from specdec.drafters.static_growth import grow_sampled, grow_static, num_rows
from specdec.drafters.static_tree import StaticTree, chain_of, static_tree
from specdec.interfaces import Noise, SamplingParams, TokenTree, Verifier
from specdec.noise import KeyedNoise
from specdec.tree import check_tree, children_table
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.traversal import TraversalVerifier
from tests.drafters.path_model import GREEDY, Path, PathModel, assert_rows, random_logits, request, tree_paths
from tests.verifiers import enumeration
from tests.verifiers.enumeration import (
    Law,
    Model,
    ScriptedNoise,
    TableTarget,
    as_tensor,
    blocks,
    joint_law,
    random_model,
    sample_tokens,
    sequences_p_value,
    target_law,
    total_variation,
)

V = 13
PLAIN = random_logits(V, 2.0)
TREE = static_tree("eagle")
WARM = SamplingParams(temperature=0.8)
VERIFIERS: list[Verifier] = [RejectionVerifier(), TraversalVerifier()]
Spoil = Callable[[TokenTree], TokenTree]


def noise_of(batch: int, coupled: bool = False) -> KeyedNoise:
    rows = torch.arange(batch)
    return KeyedNoise(rows + 7, rows, torch.full((batch,), coupled))


def ranked(root: int, tree: StaticTree, logits: Callable[[Path], Tensor]) -> list[Path]:
    """Return the token path of every node whose ranks exist, in the tree's order."""
    found: dict[Path, Path] = {(): (root,)}
    for path in tree.paths:
        if path[:-1] in found:
            values = logits(found[path[:-1]])
            order = [t for t in values.argsort(descending=True).tolist() if values[t] > -torch.inf]
            if path[-1] < len(order):
                found[path] = (*found[path[:-1]], order[path[-1]])
    return list(found.values())


@pytest.mark.parametrize("tree", [TREE, static_tree([3, 2]), static_tree([[1], [0], [1, 2], [0, 1]]), chain_of(4)])
def test_static_trees_hold_the_likeliest_tokens(tree: StaticTree) -> None:
    requests = [request(most, root) for root, most in enumerate([60, 1, 7, 0, 2, 12])]
    model = PathModel(requests, PLAIN)
    grown = grow_static(requests, tree, model, V)
    for b, r in enumerate(requests):
        assert tree_paths(grown.tree, b) == ranked(b, tree.fit(r.max_draft_tokens), PLAIN)
        assert len(model.paths[b]) == num_rows(tree, r.max_draft_tokens)  # only nodes that have children are run
    assert_rows(grown.rows, grown.tree, model)
    assert check_tree(grown.tree, requests, V) == [None] * len(requests)
    assert grown.tree.draft_probs is None
    assert all(3 not in rows for rows in model.calls)


def test_ranks_without_a_token_are_left_out_with_what_is_below() -> None:
    def logits(path: Path) -> Tensor:
        allowed = torch.zeros(V, dtype=torch.bool)
        allowed[:2] = True
        return PLAIN(path).masked_fill(~allowed, -torch.inf)

    requests = [request(60), request(3)]
    tree = static_tree([3, 3])
    for model in (PathModel(requests, logits), PathModel(requests, logits, as_list=False)):
        grown = grow_static(requests, tree, model, V)
        assert tree_paths(grown.tree, 0) == ranked(0, tree, logits)
        assert int(grown.tree.num_nodes[0]) == 1 + 2 + 4
        assert_rows(grown.rows, grown.tree, model)
    broken = grow_static(requests, tree, PathModel(requests, lambda path: torch.full((V,), torch.nan)), V)
    assert broken.tree.num_nodes.tolist() == [1, 1]


def test_a_draft_vocabulary_is_mapped() -> None:
    draft_ids = torch.arange(V).flip(0) * 7 + 3
    requests = [request(25, 0, replace(WARM, top_k=6)), request(25, 1)]
    logits = random_logits(V)
    for grown in (
        grow_sampled(requests, TREE, PathModel(requests, logits), noise_of(2), 120, draft_ids),
        grow_static(requests, TREE, PathModel(requests, logits), 120, draft_ids),
    ):
        tree = grown.tree
        assert check_tree(tree, requests, 120) == [None, None]
        assert set(tree.token_ids[:, 1:].flatten().tolist()) <= {0, *draft_ids.tolist()}
        if tree.draft_probs is not None:
            assert tree.draft_probs.shape[1] == 120
            assert int((tree.draft_probs[0] > 0).sum()) == 6
            assert bool((tree.draft_probs[:, [t for t in range(120) if t not in draft_ids]] == 0).all())


def test_a_drawn_chain_is_the_chain_that_drafters_draw() -> None:
    requests = [request(4, 0, WARM), request(2, 1, GREEDY), request(3, 2, replace(WARM, top_p=0.5))]
    for coupled in (False, True):
        noise = noise_of(3, coupled)
        seen: list[Path] = [(), (), ()]

        def advance(rows: list[int], last: Tensor, seen: list[Path] = seen) -> Tensor:
            for i, token in zip(rows, last.tolist(), strict=True):
                seen[i] = (*seen[i], token)
            return torch.stack([PLAIN(seen[i]) for i in rows])

        chain = draw_chain(requests, noise, advance, V)
        tree = grow_sampled(requests, chain_of(4), PathModel(requests, PLAIN), noise, V).tree
        assert torch.equal(tree.num_nodes, chain.num_nodes)
        assert tree.draft_probs is not None
        assert chain.draft_probs is not None
        assert tree.draft_row is not None
        assert chain.draft_row is not None
        for b, n in enumerate(tree.num_nodes.tolist()):
            assert torch.equal(tree.token_ids[b, :n], chain.token_ids[b, :n])
            rows, others = tree.draft_row[b, : n - 1], chain.draft_row[b, : n - 1]
            assert torch.equal(rows >= 0, others >= 0)
            assert torch.equal(tree.draft_probs[rows[rows >= 0]], chain.draft_probs[others[others >= 0]])


def test_drawn_trees_are_sound_and_do_not_depend_on_their_neighbours() -> None:
    sampling = [WARM, GREEDY, replace(WARM, top_k=2), replace(WARM, temperature=3.0), WARM, WARM]
    requests = [request(most, b, s) for b, (most, s) in enumerate(zip([60, 60, 60, 9, 0, 1], sampling, strict=True))]
    model = PathModel(requests, PLAIN)
    noise = noise_of(6)
    grown = grow_sampled(requests, TREE, model, noise, V)
    assert check_tree(grown.tree, requests, V) == [None] * 6
    assert_rows(grown.rows, grown.tree, model)
    assert tree_paths(grown.tree, 1) == ranked(1, TREE, PLAIN)
    assert grown.tree.draft_row is not None
    assert bool((grown.tree.draft_row[1] == -1).all())
    assert not grown.tree.with_replacement
    assert grown.tree.num_nodes[3:].tolist() == [10, 1, 2]
    assert int(grown.tree.num_nodes[2]) < 26  # top_k leaves two children to every node
    for b, siblings in enumerate(children_table(grown.tree).tolist()):
        for nodes in siblings:
            tokens = [int(grown.tree.token_ids[b, node]) for node in nodes if node >= 0]
            assert len(set(tokens)) == len(tokens)
    for b, r in enumerate(requests):
        alone = KeyedNoise(torch.tensor([b + 7]), torch.tensor([b]), torch.tensor([False]))
        tree = grow_sampled([r], TREE, PathModel([r], PLAIN), alone, V).tree
        assert tree_paths(tree, 0) == tree_paths(grown.tree, b)


def test_nan_is_left_for_the_engine_to_count() -> None:
    requests = [request(4, 0, WARM), request(4, 1, WARM)]
    model = PathModel(requests, lambda path: torch.full((V,), torch.nan) if path[0] == 0 else PLAIN(path))
    tree = grow_sampled(requests, static_tree([2, 1]), model, noise_of(2), V).tree
    reasons = check_tree(tree, requests, V)
    assert "NaN" in str(reasons[0])
    assert reasons[1] is None


# What is drawn, verified: exactly, over every branch of the draft and of the rule.


class Tables:
    """`Expand` over the draft rows of a `Model` of order 1."""

    def __init__(self, draft: Tensor) -> None:
        self._logits = draft.log()

    def __call__(self, rows: list[int], token_ids: list[Tensor], parents: list[Tensor]) -> Tensor:
        return self._logits[torch.cat(token_ids)]


def step_law(verifier: Verifier, model: Model, context: int, tree: StaticTree, most: int, spoil: Spoil) -> Law:
    """Return the law of the tokens of one step: growth and verification under one scripted noise."""
    target, draft = as_tensor(model.target), as_tensor(model.draft)
    law: Law = defaultdict(Fraction)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        noise = ScriptedNoise(scripts)
        requests = [request(most, context, SamplingParams(temperature=1.0))] * len(scripts)
        grown = spoil(grow_sampled(requests, tree, Tables(draft), noise, model.vocab_size).tree)
        result = verifier.verify(grown, TableTarget(target, grown.token_ids), noise)
        for i, block in enumerate(blocks(grown, result.path, result.num_accepted, result.next_token_ids)):
            law[block] += noise.probs[i]
        scripts = [script for _, script in noise.forks]
    return law


def error(verifier: Verifier, seed: int, tree: StaticTree, most: int, spoil: Spoil = lambda tree: tree) -> float:
    """Return how far the law of the next tokens is from the target's; float32 rounding remains."""
    model = random_model(seed, 3)
    length = tree.fit(most).depth + 1
    law = joint_law(model, lambda context: step_law(verifier, model, context, tree, most, spoil), 0, length)
    assert sum(law.values()) == 1
    return float(total_variation(law, target_law(model, 0, length)))


SHAPES: list[tuple[StaticTree, int]] = [
    (static_tree([2]), 2),
    (static_tree([3]), 3),
    (static_tree([2, 1]), 4),
    (static_tree([2, 1]), 3),
    (static_tree([[1], [0], [1, 0]]), 3),
    (static_tree([[0], [0, 0], [0, 1], [1]]), 4),
]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
@pytest.mark.parametrize(("tree", "most"), SHAPES, ids=lambda value: str(getattr(value, "paths", value)))
def test_drawn_trees_keep_the_targets_law(tree: StaticTree, most: int, verifier: Verifier) -> None:
    assert max(error(verifier, seed, tree, most) for seed in (1, 2)) < 1e-6


def test_siblings_in_another_order_than_drawn_are_detected() -> None:
    def swap(tree: TokenTree) -> TokenTree:
        token_ids = tree.token_ids.clone()
        both = tree.num_nodes > 2
        token_ids[both, 1:3] = tree.token_ids[both][:, [2, 1]]
        return replace(tree, token_ids=token_ids)

    assert max(error(RejectionVerifier(), seed, static_tree([2]), 2, swap) for seed in (1, 2, 3)) > 1e-3


TARGET = torch.tensor([[2.0, 0.5, -0.5, 1.0], [0.0, 1.5, 1.0, -1.0], [0.3, 0.2, 0.1, 0.0], [-1.0, 2.0, 0.0, 1.0]])
DRAFT = torch.tensor([[0.5, 1.0, 0.0, 1.5], [1.0, 0.0, 1.5, 0.5], [1.0, -1.0, 0.5, 0.0], [0.0, 1.0, 1.5, -0.5]])


@pytest.mark.parametrize(("verifier", "top_k"), [(VERIFIERS[0], 0), (VERIFIERS[1], 2)], ids=["rejection", "traversal"])
def test_several_steps_of_drawn_trees_with_the_real_noise(
    verifier: Verifier, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, sampling = static_tree([[0], [1], [0, 0], [0, 1]]), SamplingParams(temperature=1.0, top_k=top_k)

    def draw_tree(noise: Noise, root: Tensor, draft: Tensor, *_: object) -> TokenTree:
        requests = [request(len(tree), token, sampling) for token in root.tolist()]
        return grow_sampled(requests, tree, Tables(draft), noise, 4).tree

    monkeypatch.setattr(enumeration, "draw_tree", draw_tree)
    target = TARGET.softmax(dim=-1)
    run = sample_tokens(verifier, target, DRAFT.softmax(dim=-1), [2, 1], batch=4_000)
    assert int(run.first_accepted.max()) == 2
    assert sequences_p_value(run.tokens, target) > 1e-4
