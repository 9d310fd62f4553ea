"""Trees from measured acceptance: the dynamic programme against every tree there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from specdec.drafters.best_tree import best_tree, expected_tokens, tree_from_ranks
from specdec.drafters.static_tree import Path, StaticTree, chain_of, static_tree
from specdec.errors import ConfigError

FALLING = [0.5, 0.2, 0.1, 0.05]
UNEVEN = [0.1, 0.6, 0.0, 0.2]  # the second candidate is better than the first; the third never right
SURE = [1.0, 0.0]
TIMES: dict[str, Callable[[int], float]] = {
    "flat": lambda n: 1.0,
    "linear": lambda n: 1.0 + 0.1 * n,
    "steep": lambda n: float(n),
    "stairs": lambda n: 1.0 + (n > 2) + (n > 5),
}


def every_tree(ranks: int, max_nodes: int, max_depth: int) -> Iterator[frozenset[Path]]:
    """Yield every set of paths that holds the parents and the lower siblings of its paths."""
    known = {frozenset[Path]()}
    yield from known
    for _ in range(max_nodes):
        grown = set()
        for paths in known:
            for above in ((), *paths):
                siblings = sum(path[:-1] == above for path in paths)
                if siblings < ranks and len(above) < max_depth:
                    grown.add(paths | {(*above, siblings)})
        known = grown
        yield from known


def time_per_token(
    paths: Sequence[Path] | frozenset[Path], acceptance: Sequence[float], step: Callable[[int], float], draft: float
) -> float:
    tokens = 1 + sum(math.prod(acceptance[rank] for rank in path) for path in paths)
    return (max(map(len, paths), default=0) * draft + step(1 + len(paths))) / tokens


@pytest.mark.parametrize("acceptance", [FALLING, UNEVEN, SURE, [0.0], [0.3, 0.3, 0.3]], ids=str)
@pytest.mark.parametrize("draft", [0.0, 0.25])
@pytest.mark.parametrize("step", TIMES)
def test_no_tree_is_better(acceptance: list[float], draft: float, step: str) -> None:
    trees = list(every_tree(len(acceptance), 6, 4))
    found = best_tree(acceptance, TIMES[step], draft, 6, 4)
    assert frozenset(found.paths) in set(trees)  # no gaps among siblings, no orphans, within the limits
    least = min(time_per_token(paths, acceptance, TIMES[step], draft) for paths in trees)
    assert time_per_token(found.paths, acceptance, TIMES[step], draft) == pytest.approx(least, rel=1e-12)


def test_the_trees_of_the_brute_force_are_all() -> None:
    """Trees with up to 4 ordered children: one more node than drafts, counted by Catalan's numbers while they fit."""
    trees = list(every_tree(4, 4, 4))
    assert [sum(len(paths) == n for paths in trees) for n in range(5)] == [1, 1, 2, 5, 14]
    assert len(set(trees)) == len(trees)


def test_the_expected_tokens_are_the_ones_used() -> None:
    assert expected_tokens(StaticTree([]), FALLING) == 1.0
    assert expected_tokens(StaticTree([(0,), (1,), (0, 1)]), FALLING) == pytest.approx(1 + 0.5 + 0.2 + 0.1)


def test_dear_rows_draft_nothing_and_cheap_ones_everything() -> None:
    assert best_tree([0.1], lambda n: float(n), 1.0, 8, 4).paths == ()
    assert len(best_tree(FALLING, [1.0] * 9, 0.0, 8, 4)) == 8
    assert best_tree([0.9], [1.0] * 9, 0.01, 8, 5).paths == chain_of(5).paths
    # Drafting levels cost: rather wide than deep.
    assert best_tree(FALLING, [1.0] * 9, 0.5, 4, 4).depth == 1 < best_tree(FALLING, [1.0] * 9, 0.0, 4, 4).depth


def test_every_beginning_is_a_good_tree() -> None:
    tree = best_tree(FALLING, [1.0] * 17, 0.0, 16, 5)
    for size in range(1, 17):
        best = expected_tokens(best_tree(FALLING, [1.0] * (size + 1), 0.0, size, 5), FALLING)
        assert expected_tokens(tree.fit(size), FALLING) == pytest.approx(best)
    assert static_tree([list(path) for path in tree.paths]).paths == tree.paths


def test_a_large_tree_is_found() -> None:
    tree = best_tree([0.6, 0.12, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01], lambda n: 1.0 + n / 64, 0.02, 128, 12)
    assert 8 < len(tree) < 128
    assert tree.depth > 3


HEADS = [[0.6, 0.2, 0.05], [0.4, 0.3, 0.1], [0.2, 0.25]]


@pytest.mark.parametrize("heads", [HEADS, [[0.5, 0.25], [0.5, 0.25]], [[0.0, 0.3], [0.5]]], ids=str)
def test_rank_trees_hold_the_likeliest_paths(heads: list[list[float]]) -> None:
    def chance(path: Path) -> float:
        return math.prod(heads[depth][rank] for depth, rank in enumerate(path))

    everything = [
        path
        for depth in range(1, len(heads) + 1)
        for path in itertools.product(*(range(len(row)) for row in heads[:depth]))
    ]
    everything = sorted((p for p in everything if chance(p) > 0), key=lambda p: (-chance(p), len(p), p))
    for size in range(1, len(everything) + 3):
        found = tree_from_ranks(heads, size)
        assert found.paths == tuple(everything[:size])
        assert found.paths == tree_from_ranks(heads, 100).fit(size).paths
        StaticTree(found.paths)  # parents come first


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"acceptance": []}, "one or more probabilities"),
        ({"acceptance": [0.5, -0.1]}, r"acceptance=\[0.5, -0.1\]"),
        ({"acceptance": [0.5, math.nan]}, "nan"),
        ({"acceptance": [0.7, 0.6]}, "sum to at most 1"),
        ({"max_nodes": 0}, "max_nodes=0"),
        ({"max_nodes": 5000}, "from 1 to 1024"),
        ({"max_depth": True}, "max_depth=True"),
        ({"draft_time": -1.0}, "draft_time=-1.0"),
        ({"draft_time": math.inf}, "draft_time=inf"),
        ({"step_time": [1.0, 1.0]}, "2 entries, 5 are needed"),
        ({"step_time": lambda n: 0.0}, "above 0"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else value,
)
def test_what_is_no_measurement_is_refused(change: dict[str, Any], complaint: str) -> None:
    good: dict[str, Any] = {
        "acceptance": FALLING, "step_time": [1.0] * 5, "draft_time": 0.1, "max_nodes": 4, "max_depth": 3,
    }  # fmt: skip
    best_tree(**good)
    with pytest.raises(ConfigError, match=complaint):
        best_tree(**(good | change))


@pytest.mark.parametrize(
    ("heads", "nodes", "complaint"),
    [([], 4, "empty"), ([[0.5], []], 4, "accuracies of head 1"), ([[0.9, 0.2]], 4, "sum"), ([[0.9]], 0, "max_nodes=0")],
)
def test_what_are_no_accuracies_is_refused(heads: list[list[float]], nodes: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tree_from_ranks(heads, nodes)
