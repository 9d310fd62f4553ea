"""EAGLE-2 trees against a slow and obvious growth of one tree at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.autoregression import draw_chain
from specdec.drafters.dynamic_tree import DynamicTree, grow
from specdec.errors import ConfigError
from specdec.interfaces import TokenTree
from specdec.noise import KeyedNoise
from specdec.tree import check_tree, children_table
from specdec.verifiers.match import MatchVerifier
from tests.drafters.path_model import Path, PathModel, assert_rows, random_logits, request, tree_paths

V = 13
LOGITS = {
    "flat": random_logits(V, 0.5),
    "plain": random_logits(V, 2.0),
    "sharp": random_logits(V, 8.0),
    # The same numbers after every path, in another order: paths of the same ranks have exactly equal scores.
    "ties": lambda path: -0.5 * random_logits(V)(path).argsort().to(torch.float32),
}


def log_probs(logits: Tensor) -> list[float]:
    return (logits - logits.logsumexp(dim=0)).clamp_max(0.0).to(torch.float64).tolist()


def obvious(root: int, most: int, shape: DynamicTree, logits: Callable[[Path], Tensor]) -> list[Path]:
    """Return the paths of one tree in creation order: run every frontier, then rank everything that was remembered."""
    remembered: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(0.0, (root,))]
    for _ in range(shape.depth):
        candidates = []
        for score, path in frontier:
            scored = sorted(enumerate(log_probs(logits(path))), key=lambda pair: -pair[1])
            candidates += [(score + value, (*path, token)) for token, value in scored[: shape.top_k]]
        remembered += candidates
        frontier = sorted(candidates, key=lambda pair: -pair[0])[: shape.top_k]
    ranked = sorted(range(len(remembered)), key=lambda i: -remembered[i][0])
    best = sorted(ranked[: min(shape.total_tokens - 1, most)])
    return [(root,), *(remembered[i][1] for i in best)]


SHAPES = [(3, 4, 12), (5, 10, 60), (4, 1, 60), (1, 4, 60), (6, 3, 9), (2, 13, 20), (3, 40, 500)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", LOGITS)
def test_ragged_batches_grow_the_trees_of_the_obvious_way(kind: str, shape: tuple[int, int, int]) -> None:
    dynamic = DynamicTree(*shape)
    requests = [request(most, root) for root, most in enumerate([60, 1, 7, 0, 2, 25, 3])]
    model = PathModel(requests, LOGITS[kind], as_list=shape[0] % 2 == 0)
    grown = grow(requests, dynamic, model, V)
    for b, r in enumerate(requests):
        assert tree_paths(grown.tree, b) == obvious(b, r.max_draft_tokens, dynamic, LOGITS[kind])
        assert len(model.paths[b]) <= dynamic.num_rows(r.max_draft_tokens)
        assert int(grown.tree.num_nodes[b]) - 1 <= dynamic.num_nodes(r.max_draft_tokens)
    assert check_tree(grown.tree, requests, V) == [None] * len(requests)
    assert_rows(grown.rows, grown.tree, model)
    assert grown.tree.draft_probs is None
    assert len(model.calls) <= shape[0]
    assert all(3 not in rows for rows in model.calls)  # the request without budget is never run


def test_a_batch_grows_what_each_request_grows_alone() -> None:
    shape, logits = DynamicTree(4, 5, 20), LOGITS["plain"]
    requests = [request(most, root) for root, most in enumerate([19, 4, 40])]
    together = grow(requests, shape, PathModel(requests, logits), V)
    for b, r in enumerate(requests):
        alone = grow([r], shape, PathModel([r], logits), V)
        assert tree_paths(alone.tree, 0) == tree_paths(together.tree, b)
        assert alone.rows[0] == together.rows[b]


@pytest.mark.parametrize("most", [1, 3, 9])
def test_one_child_everywhere_is_the_greedy_chain(most: int) -> None:
    logits = LOGITS["ties"]
    requests = [request(most, root) for root in (1, 2)]
    grown = grow(requests, DynamicTree(5, 1, 60), PathModel(requests, logits), V)
    seen: list[Path] = [(1,), (2,)]

    def advance(rows: list[int], last: Tensor) -> Tensor:
        for i, token in zip(rows, last.tolist(), strict=True):
            seen[i] = seen[i] if len(seen[i]) == 1 and seen[i][0] == token else (*seen[i], token)
        return torch.stack([logits(seen[i]) for i in rows])

    noise = KeyedNoise(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    chain = draw_chain([request(min(most, 5), root) for root in (1, 2)], noise, advance, V)
    assert torch.equal(grown.tree.token_ids, chain.token_ids)
    assert torch.equal(grown.tree.parents, chain.parents)
    length = min(most, 5)
    assert grown.rows == [[*range(length), -1]] * 2  # the last token is never run


def test_equal_logits_chain_to_the_first() -> None:
    requests = [request(3)]
    grown = grow(requests, DynamicTree(3, 1), PathModel(requests, lambda path: torch.zeros(V)), V)
    assert grown.tree.token_ids.tolist() == [[0, 0, 0, 0]]


def test_small_budgets_run_few_rows() -> None:
    """Budgets cut rows and levels exactly: `num_rows` is met where the draft is sure of one path."""
    shape = DynamicTree(5, 10, 60)
    assert [shape.num_rows(most) for most in (0, 1, 2, 3, 4, 59, 1000)] == [0, 1, 2, 4, 7, 41, 41]
    assert DynamicTree(5, 10, 5).num_rows(1000) == shape.num_rows(4)
    for most in (1, 2, 3, 4, 12):
        requests = [request(most)]
        model = PathModel(requests, lambda path: torch.arange(V, 0, -1).float())
        grow(requests, shape, model, V)
        assert len(model.calls) <= min(most, 5)
        assert len(model.paths[0]) <= shape.num_rows(most)
    # Children nearly as good as their parents: as deep as it goes.
    requests = [request(4)]
    model = PathModel(requests, lambda path: torch.tensor([9.0, *[-9.0] * (V - 1)]))
    grow(requests, shape, model, V)
    assert len(model.calls) == 4


def test_a_draft_vocabulary_is_mapped() -> None:
    draft_ids = torch.arange(V).flip(0) * 7 + 3
    logits = LOGITS["plain"]
    back = {int(token): d for d, token in enumerate(draft_ids)}

    def of_mapped(path: Path) -> Tensor:
        return logits((path[0], *(back[token] for token in path[1:])))

    requests = [request(10)]
    model = PathModel(requests, lambda path: torch.cat([of_mapped(path), torch.tensor([99.0])]))  # a padded head
    grown = grow(requests, DynamicTree(3, 4, 30), model, 100, draft_ids)
    plain = grow(requests, DynamicTree(3, 4, 30), PathModel(requests, logits), V)
    assert grown.tree.token_ids[0, 1:].tolist() == draft_ids[plain.tree.token_ids[0, 1:]].tolist()
    assert torch.equal(grown.tree.parents, plain.tree.parents)


def test_padding_and_impossible_tokens_are_never_drafted() -> None:
    def padded(path: Path) -> Tensor:
        values = LOGITS["plain"](path)
        values[3:] = float("-inf")
        return torch.cat([values, torch.full((4,), 50.0)])

    requests = [request(100, 1)]
    grown = grow(requests, DynamicTree(3, 6, 100), PathModel(requests, padded), V)
    paths = tree_paths(grown.tree, 0)
    assert len(paths) == 1 + 3 + 9 + 18  # six of nine are run
    assert all(token < 3 for path in paths for token in path)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_numbers_that_mean_nothing_draft_nothing(bad: float) -> None:
    def logits(path: Path) -> Tensor:
        broken = path[0] == 1 or (path[0] == 2 and len(path) == 2)
        return torch.full((V,), bad) if broken else LOGITS["plain"](path)

    requests = [request(8, 0), request(8, 1), request(8, 2)]
    grown = grow(requests, DynamicTree(3, 4, 60), PathModel(requests, logits), V)
    assert grown.tree.num_nodes.tolist() == [9, 1, 5]
    assert check_tree(grown.tree, requests, V) == [None] * 3


def test_nothing_is_run_for_nobody() -> None:
    requests = [request(0, 4), request(0, 5)]
    model = PathModel(requests, LOGITS["plain"])
    grown = grow(requests, DynamicTree(), model, V)
    assert model.calls == []
    assert grown.tree.token_ids.tolist() == [[4], [5]]
    assert grown.rows == [[-1], [-1]]


class _Target:
    """TargetRows over paths."""

    def __init__(self, tree: TokenTree, logits: Callable[[Path], Tensor], greedy: bool) -> None:
        self._paths = [tree_paths(tree, b) for b in range(tree.token_ids.shape[0])]
        self._logits, self._greedy = logits, greedy

    def probs(self, rows: Tensor, nodes: Tensor) -> Tensor:
        wanted = zip(rows.tolist(), nodes.tolist(), strict=True)
        return torch.stack([self._logits(self._paths[b][node]).softmax(-1) for b, node in wanted])

    def top(self, rows: Tensor, nodes: Tensor) -> Tensor | None:
        return self.probs(rows, nodes).argmax(dim=-1) if self._greedy else None


@pytest.mark.parametrize("greedy", [True, False])
def test_the_order_of_siblings_does_not_matter(greedy: bool) -> None:
    batch, logits = 24, LOGITS["sharp"]
    requests = [request(20, root % V) for root in range(batch)]
    model = PathModel(requests, lambda path: logits(path) + 0.5 * LOGITS["plain"]((99, *path)))
    tree = grow(requests, DynamicTree(4, 4, 21), model, V).tree
    swapped = _siblings_reversed(tree)
    assert not torch.equal(tree.token_ids, swapped.token_ids)
    noise = KeyedNoise(torch.arange(batch), torch.zeros(batch), torch.zeros(batch))
    emitted = []
    for t in (tree, swapped):
        result = MatchVerifier().verify(t, _Target(t, logits, greedy), noise)
        paths = [tree_paths(t, b) for b in range(batch)]
        last = [int(result.path[b, n - 1]) if n else 0 for b, n in enumerate(result.num_accepted.tolist())]
        emitted.append([(*paths[b][node], int(result.next_token_ids[b])) for b, node in enumerate(last)])
    assert emitted[0] == emitted[1]
    assert any(len(tokens) > 3 for tokens in emitted[0])


def _siblings_reversed(tree: TokenTree) -> TokenTree:
    """Return the same trees depth first with every node's children in the opposite order."""
    table = children_table(tree)
    token_ids, parents = tree.token_ids.clone(), tree.parents.clone()
    for b in range(token_ids.shape[0]):
        count, waiting = 0, [(0, -1)]
        while waiting:
            node, parent = waiting.pop()
            token_ids[b, count], parents[b, count] = tree.token_ids[b, node], parent
            waiting += [(child, count) for child in table[b, node].tolist() if child >= 0]
            count += 1
    return TokenTree(token_ids, parents, tree.num_nodes)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"depth": 0}, "depth=0; allowed: an integer from 1"),
        ({"depth": True}, "depth=True"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_k": 65}, "top_k=65"),
        ({"total_tokens": 1}, "total_tokens=1; .* counts the root"),
        ({"total_tokens": "60"}, "total_tokens='60'"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        DynamicTree(**options)
