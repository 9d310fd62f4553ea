"""Static trees: what may be written, and what is drafted where there is no room for all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from specdec.drafters.static_tree import PRESETS, StaticTree, chain_of, static_tree
from specdec.errors import ConfigError
from specdec.tree import depths


def parents_of(tree: StaticTree) -> torch.Tensor:
    return torch.tensor(tree.parents)


@pytest.mark.parametrize(
    ("name", "nodes", "per_depth", "width"),
    [
        ("recycling", 80, [8, 21, 25, 15, 8, 3], 8),
        ("medusa", 63, [10, 28, 23, 2], 10),
        ("eagle", 25, [4, 8, 8, 3, 2], 4),
    ],
)
def test_the_published_trees(name: str, nodes: int, per_depth: list[int], width: int) -> None:
    tree = static_tree(name)
    assert len(tree) == nodes
    assert [len(level) for level in tree.levels()] == [1, *per_depth]
    assert depths(parents_of(tree)).bincount().tolist() == [1, *per_depth]
    assert tree.width == width
    assert tree.depth == len(per_depth)
    # Ranks of siblings have no gaps: the published lists count candidates.
    siblings: dict[int, list[int]] = {}
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        siblings.setdefault(parent, []).append(rank)
    assert all(sorted(ranks) == list(range(len(ranks))) for ranks in siblings.values())


@pytest.mark.parametrize("tree", [*PRESETS, [3, 2, 1], [[1], [0], [1, 0], [0, 3]], [[0, 0, 0], [0], [0, 0]]], ids=str)
def test_every_beginning_is_a_tree(tree: Any) -> None:
    whole = static_tree(tree)
    for most in range(len(whole) + 2):
        part = whole.fit(most)
        assert len(part) == min(most, len(whole))
        assert part.paths == whole.paths[:most]
        assert part.parents == whole.parents[: most + 1]
        assert all(-1 <= parent < node for node, parent in enumerate(part.parents))
        assert depths(parents_of(part)).tolist() == [0, *map(len, part.paths)]


def test_numbers_of_children_make_the_full_tree_likeliest_first() -> None:
    tree = static_tree([3, 2])
    assert set(tree.paths) == {(a,) for a in range(3)} | {(a, b) for a in range(3) for b in range(2)}
    assert tree.paths[:3] == ((0,), (0, 0), (1,))


def test_paths_keep_their_order_and_parents_come_first() -> None:
    assert static_tree([[1], [0, 0], [0]]).paths == ((1,), (0,), (0, 0))


def test_a_chain_is_a_tree_of_likeliest_children() -> None:
    assert chain_of(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert chain_of(3).parents == [-1, 0, 1, 2]
    assert len(chain_of(0)) == 0
    assert chain_of(0).width == 1


def test_yaml_can_spell_trees() -> None:
    assert static_tree(yaml.safe_load("[[0], [1], [0, 0]]")).paths == ((0,), (1,), (0, 0))
    assert len(static_tree(yaml.safe_load("[2, 2]"))) == 6


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ("medsua", "tree='medsua'; allowed: a name .eagle, medusa, recycling."),
        ("", "tree=''"),
        ([], r"tree=\[\]"),
        (3, "tree=3"),
        (True, "tree=True"),
        ({0: 1}, "allowed"),
        ([2, 0], "tree has 2"),
        ([[0], "1"], "tree has '1'"),
        ([[0], []], r"tree has \[\]"),
        ([[0], [0, -1]], r"tree has \[0, -1\]"),
        ([[0], [True]], r"tree has \[True\]"),
        ([[0], [1, 0]], r"path \[1, 0\] without its parent \[1\]; add"),
        ([[0, 0]], r"without its parent \[0\]"),
        ([[0], [1], [0]], r"path \[0\] twice"),
        ([1000, 1000], "more than 1024 nodes"),
        ([[i] for i in range(2000)], "2000 paths"),
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(tree: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        static_tree(tree)
