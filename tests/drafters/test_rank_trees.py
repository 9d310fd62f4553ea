"""Trees of independent heads: the likeliest paths, by trying all of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.rank_trees import FixedTree, Nodes, ProductTree
from specdec.drafters.static_tree import static_tree
from specdec.errors import ConfigError

Path = tuple[int, ...]


def paths_of(nodes: Nodes, row: int) -> list[Path]:
    """Return the path of ranks of every node; also checks that parents come first and lie one head above."""
    parents, heads, ranks = (values[row].tolist() for values in nodes)
    paths: list[Path] = [()]
    assert (parents[0], heads[0], ranks[0]) == (-1, 0, 0)
    for node in range(1, len(parents)):
        assert 0 <= parents[node] < node
        paths.append((*paths[parents[node]], ranks[node]))
        assert heads[node] == len(paths[node]) - 1
    return paths[1:]


def random_log_probs(batch: int, heads: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(batch, heads, width + 1, generator=generator, dtype=torch.float64).softmax(dim=-1)
    return probs[..., :width].sort(dim=-1, descending=True).values.log()


def best_by_trying(log_probs: Tensor, num_nodes: int) -> list[float]:
    heads, width = log_probs.shape
    every = (p for depth in range(1, heads + 1) for p in itertools.product(range(width), repeat=depth))
    return sorted((chance(log_probs, path) for path in every), reverse=True)[:num_nodes]


def chance(log_probs: Tensor, path: Path) -> float:
    return sum(float(log_probs[head, rank]) for head, rank in enumerate(path))


@pytest.mark.parametrize(("heads", "width", "num_nodes"), [(1, 4, 3), (3, 4, 1), (3, 4, 20), (2, 3, 50), (4, 3, 63)])
def test_the_best_paths_are_those_that_trying_finds(heads: int, width: int, num_nodes: int) -> None:
    log_probs = random_log_probs(3, heads, width)
    nodes = ProductTree(top_k=width).nodes(log_probs, num_nodes)
    for row in range(3):
        paths = paths_of(nodes, row)
        assert len(set(paths)) == len(paths)
        found = [chance(log_probs[row], path) for path in paths]
        assert found == pytest.approx(best_by_trying(log_probs[row], num_nodes))


def test_a_beginning_is_the_best_smaller_tree() -> None:
    log_probs = random_log_probs(2, 3, 5)
    large, small = (ProductTree().nodes(log_probs, n) for n in (40, 7))
    assert all(torch.equal(a[:, :8], b) for a, b in zip(large, small, strict=True))


def test_ties_go_to_the_shorter_path_and_the_lower_ranks() -> None:
    sure = torch.tensor([[[0.0, -1.0], [0.0, -1.0], [0.0, -1.0]]], dtype=torch.float64)
    assert paths_of(ProductTree().nodes(sure, 7), 0) == [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0), (0, 0, 1)]


def test_what_has_no_chance_comes_last() -> None:
    log_probs = torch.tensor([[[-1.0, -torch.inf], [-0.5, -2.0]]], dtype=torch.float64)
    paths = paths_of(ProductTree().nodes(log_probs, 6), 0)
    assert paths[:3] == [(0,), (0, 0), (0, 1)]
    assert all(math.isinf(chance(log_probs[0], path)) for path in paths[3:])


def test_a_tree_is_no_larger_than_asked() -> None:
    shape = ProductTree(top_k=3, total_tokens=6)
    assert shape.extent(63) == (5, 3)
    assert shape.extent(2) == (2, 2)
    assert shape.nodes(random_log_probs(2, 3, 3), 63).parents.shape == (2, 6)


@pytest.mark.parametrize("tree", ["medusa", [2, 2, 1], [[1], [0], [0, 3]]], ids=str)
def test_fixed_trees_are_the_static_ones_at_every_size(tree: Any) -> None:
    whole = static_tree(tree)
    shape = FixedTree(whole)
    for most in range(1, len(whole) + 2):
        part = whole.fit(most)
        assert shape.extent(most) == (part.depth, part.width)
        nodes = shape.nodes(torch.zeros(2, *shape.extent(most)), most)
        assert paths_of(nodes, 0) == paths_of(nodes, 1) == list(part.paths)


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 65}, {"total_tokens": 1}, {"top_k": True}], ids=str)
def test_sizes_out_of_range_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"tree: .*; allowed: an integer from"):
        ProductTree(**options)
