"""What every registered verifier keeps, new ones included."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from specdec.build import build_verifiers
from specdec.errors import ConfigError
from specdec.interfaces import TokenTree, Verifier
from specdec.noise import KeyedNoise
from specdec.registry import VERIFIERS
from specdec.tree import path_to, stack_trees
from tests.decoding import add, drain, engine_of, prompts, reference
from tests.models.architectures import model_of, named

VOCAB = 5
each = pytest.mark.parametrize("name", VERIFIERS.names())
each_lossless = pytest.mark.parametrize("name", [n for n in VERIFIERS.names() if VERIFIERS.load(n).lossless])


class GreedyRows:
    """One-hot target distributions; `knows_top` also answers with the argmax, as greedy requests do."""

    def __init__(self, best: Tensor, knows_top: bool) -> None:
        self.best, self.knows_top = best, knows_top  # [B, M]
        self.asked: list[tuple[int, int]] = []

    def probs(self, rows: Tensor, nodes: Tensor) -> Tensor:
        self.asked += list(zip(rows.tolist(), nodes.tolist(), strict=True))
        return torch.nn.functional.one_hot(self.best[rows, nodes], VOCAB).float()

    def top(self, rows: Tensor, nodes: Tensor) -> Tensor | None:
        if not self.knows_top:
            return None
        self.asked += list(zip(rows.tolist(), nodes.tolist(), strict=True))
        return self.best[rows, nodes]


def random_trees(seed: int) -> TokenTree:
    dice = random.Random(seed)
    trees = []
    for _ in range(6):
        size = dice.randint(1, 9)
        parents = [-1, *(dice.randrange(i) for i in range(1, size))]
        trees.append(([dice.randrange(VOCAB) for _ in range(size)], parents))
    return stack_trees(trees)


def walk(tree: TokenTree, best: Tensor, row: int) -> tuple[list[int], int]:
    """Return the path that greedy decoding takes through one tree, and the token after it."""
    node, path = 0, []
    while True:
        token = int(best[row, node])
        children = [
            c
            for c in range(1, int(tree.num_nodes[row]))
            if tree.parents[row, c] == node and tree.token_ids[row, c] == token
        ]
        if not children:
            return path, token
        node = children[0]  # of equal siblings any would be right; the first one is every rule's choice
        path.append(node)


def make(name: str) -> Verifier:
    verifier: Verifier = VERIFIERS.load(name)()
    return verifier


@each
def test_it_says_what_it_is(name: str) -> None:
    verifier = make(name)
    assert verifier.name == name
    assert all(isinstance(getattr(verifier, flag), bool) for flag in ("lossless", "needs_all_rows", "couples_draft"))
    choice = build_verifiers(name)
    assert choice.greedy is choice.seeded is choice.sampled


@each_lossless
@pytest.mark.parametrize("knows_top", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_greedy_is_the_argmax_walk(name: str, seed: int, knows_top: bool) -> None:
    verifier = make(name)
    tree = random_trees(seed)
    best = torch.randint(0, VOCAB, tree.token_ids.shape, generator=torch.Generator().manual_seed(seed))
    noise = KeyedNoise(torch.arange(6), torch.full((6,), 9), torch.zeros(6, dtype=torch.bool))
    target = GreedyRows(best, knows_top)
    result = verifier.verify(tree, target, noise)
    for row in range(6):
        path, token = walk(tree, best, row)
        count = int(result.num_accepted[row])
        assert result.path[row, :count].tolist() == path
        assert bool((result.path[row, count:] == -1).all())
        assert result.next_token_ids[row] == token
        if not verifier.needs_all_rows:
            # Processors see the prefixes of plain decoding, each once and in order.
            assert [node for r, node in target.asked if r == row] == [0, *path]
        assert path_to(tree.parents[row], path[-1] if path else 0).tolist() == path


@each
def test_shapes_and_dtypes(name: str) -> None:
    tree = random_trees(0)
    target = GreedyRows(torch.zeros_like(tree.token_ids), True)
    noise = KeyedNoise(torch.arange(6), torch.full((6,), 9), torch.zeros(6, dtype=torch.bool))
    result = make(name).verify(tree, target, noise)
    assert result.path.shape[0] == 6
    assert result.num_accepted.shape == result.next_token_ids.shape == (6,)
    assert result.path.dtype == result.num_accepted.dtype == result.next_token_ids.dtype == torch.int64


@each_lossless
def test_through_the_engine(name: str) -> None:
    """Chosen by name it also serves greedy requests."""
    model = model_of(named("llama"))
    for drafter, options in (("oracle", {"width": 2}), ("draft_model", {"model": model_of(named("qwen2"))})):
        engine = engine_of(model, drafter, options, verifier=name)
        requests = [add(engine, prompt, 12) for prompt in prompts(3, 7)]
        drain(engine)
        assert [r.new_tokens for r in requests] == [reference(model, p, 12) for p in prompts(3, 7)]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown verifier 'rejetion'; did you mean 'rejection'"):
        build_verifiers("rejetion")
