"""Static trees from measured acceptance: which nodes pay for their row (Sequoia, Medusa). Drafts nothing itself."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.drafters.static_tree import MOST_NODES, Path, StaticTree
from specdec.errors import ConfigError

_MASS_TOLERANCE = 1e-6  # children of a node exclude each other, so their chances sum to at most 1


def expected_tokens(tree: StaticTree, acceptance: Sequence[float]) -> float:
    """Return the tokens a step is expected to emit: the next token and every draft token that is accepted.

    Args:
        tree: what is drafted.
        acceptance: chance that the child of each rank is the accepted one, at any node that is reached.
    """
    return 1.0 + sum(math.prod(acceptance[rank] for rank in path) for path in tree.paths)


def best_tree(
    acceptance: Sequence[float],
    step_time: Callable[[int], float] | Sequence[float],
    draft_time: float,
    max_nodes: int,
    max_depth: int,
) -> StaticTree:
    """Return the tree with the least time per token.

    The time of a step is `draft_time` per level and the target's forward over the root and all nodes; its tokens are
    `expected_tokens`. A node's children have the ranks 0, 1, ... without gaps, as what is known of a rank was measured
    with the ranks before it in place. Of equally good trees the shallowest and then smallest is taken.

    Args:
        acceptance: chance that the child of rank 0, 1, ... is the accepted one, at a node that is reached.
        step_time: seconds of a forward of the target by its rows, such as `StepTimes.at`; or a sequence that begins
            with the time of one row.
        draft_time: seconds of one level of drafting; 0 if all levels come from one pass.
        max_nodes: draft tokens at most, the root excluded.
        max_depth: levels at most.

    Returns:
        The tree, empty if drafting does not pay; its nodes are in the order of their worth, so that `fit` leaves a
        good smaller tree.

    Raises:
        ConfigError: a number is out of range, or a sequence of step times is too short.

    Source: Chen et al. 2024, Sequoia, arXiv 2402.12374 (tree construction and hardware-aware choice of its size).
    """
    chances = _chances("acceptance", acceptance)
    _check_count("max_nodes", max_nodes, MOST_NODES)
    _check_count("max_depth", max_depth, MOST_NODES)
    if not math.isfinite(draft_time) or draft_time < 0:
        raise ConfigError(f"draft_time={draft_time!r}; allowed: seconds, 0 or more")
    seconds = _seconds(step_time, max_nodes + 1)
    levels = _solve(chances, max_nodes + 1, min(max_depth, max_nodes))
    least, size, depth = math.inf, 1, 0
    for at, level in enumerate(levels):
        for rows in range(1, max_nodes + 2):
            # Where no tree has exactly that many nodes the expectation is -inf.
            cost = (at * draft_time + seconds[rows - 1]) / level.tokens[rows] if level.tokens[rows] > 0 else math.inf
            if cost < least:
                least, size, depth = cost, rows, at
    return StaticTree(_by_worth(_paths(levels, size, depth), chances))


def tree_from_ranks(accuracies: Sequence[Sequence[float]], max_nodes: int) -> StaticTree:
    """Return the tree of the `max_nodes` paths that are likeliest to be right, for heads that guess independently.

    The chance of a path is the product of its heads' accuracies at its ranks. Paths that are never right are left out.
    Ties go to the shorter path, then to the lower ranks.

    Args:
        accuracies: per head (level of the tree) how often its guess of rank 0, 1, ... is the right token.
        max_nodes: draft tokens at most, the root excluded.

    Returns:
        The tree; its nodes are in the order of their chance, so that `fit` leaves the best smaller tree.

    Raises:
        ConfigError: a number is out of range.

    Source: Cai et al. 2024, Medusa, arXiv 2401.10774, section 2.3.3 (optimised tree construction).
    """
    if not len(accuracies):
        raise ConfigError("accuracies are empty; pass one row of accuracies by rank per head")
    heads = [_chances(f"accuracies of head {i}", row) for i, row in enumerate(accuracies)]
    _check_count("max_nodes", max_nodes, MOST_NODES)
    paths: list[Path] = []
    waiting: list[tuple[float, int, Path]] = [(-1.0, 0, ())]
    while waiting and len(paths) <= max_nodes:
        chance, depth, path = heapq.heappop(waiting)
        paths.append(path)
        if depth < len(heads):
            for rank, accuracy in enumerate(heads[depth]):
                if chance * accuracy < 0:
                    heapq.heappush(waiting, (chance * accuracy, depth + 1, (*path, rank)))
    return StaticTree(paths[1:])


class _Solved(NamedTuple):
    """The best trees of at most some depth, by their number of nodes n, root included; index 0 means nothing."""

    tokens: Any  # [n] expected tokens, -inf where there is no such tree
    num_children: Any  # [n] of the best tree's root
    before: list[Any]  # per number of children b >= 1: [n] nodes of the best such tree without its last child's subtree


def _solve(chances: Sequence[float], most: int, max_depth: int) -> list[_Solved]:
    """Return the best trees of every size up to `most` for every depth from 0 up.

    A tree whose root has b children is one with b - 1 children and a subtree below the b-th, which is one level
    lower and counts as often as that child is accepted.
    """
    bare = np.full(most + 1, -np.inf)
    bare[1] = 1.0
    levels = [_Solved(bare, np.zeros(most + 1, dtype=int), [])]
    for _ in range(max_depth):
        below = levels[-1].tokens
        tokens, num_children = bare.copy(), np.zeros(most + 1, dtype=int)
        fewer, before = bare, []
        for b, chance in enumerate(chances, 1):
            if chance <= 0 and all(c <= 0 for c in chances[b:]):
                break  # 0 * -inf is no number, and children that are never accepted are worth nothing
            here, split = np.full(most + 1, -np.inf), np.zeros(most + 1, dtype=int)
            subtree = np.where(np.isneginf(below), -np.inf, chance * np.where(np.isneginf(below), 0.0, below))
            for n in range(2, most + 1):
                sums = fewer[1:n] + subtree[n - 1 : 0 : -1]
                split[n] = 1 + int(sums.argmax())
                here[n] = sums[split[n] - 1]
            better = here > tokens
            tokens, num_children = np.where(better, here, tokens), np.where(better, b, num_children)
            before.append(split)
            fewer = here
        levels.append(_Solved(tokens, num_children, before))
    return levels


def _paths(levels: Sequence[_Solved], size: int, depth: int) -> Iterable[Path]:
    """Yield the paths of the best tree of `size` nodes, root included, and at most `depth` levels; any order."""
    for b in range(int(levels[depth].num_children[size]), 0, -1):
        rest = int(levels[depth].before[b - 1][size])
        yield (b - 1,)
        yield from ((b - 1, *path) for path in _paths(levels, size - rest, depth - 1))
        size = rest


def _by_worth(paths: Iterable[Path], chances: Sequence[float]) -> list[Path]:
    """Return the paths, the likeliest to be accepted first, none before its parent or a sibling of lower rank."""
    left = {path: (-math.prod(chances[rank] for rank in path), len(path), path) for path in paths}
    ordered: list[Path] = []
    waiting = [left[(0,)]] if left else []
    while waiting:
        path = heapq.heappop(waiting)[-1]
        ordered.append(path)
        for other in ((*path, 0), (*path[:-1], path[-1] + 1)):
            if other in left:
                heapq.heappush(waiting, left[other])
    return ordered


def _chances(name: str, values: Sequence[float]) -> list[float]:
    """Return the values as floats.

    Raises:
        ConfigError: there are none, one is no probability, or they sum to more than 1.
    """
    chances = [float(value) for value in values]
    if not chances or not all(0.0 <= c <= 1.0 for c in chances) or sum(chances) > 1.0 + _MASS_TOLERANCE:
        raise ConfigError(
            f"{name}={chances}; allowed: one or more probabilities by rank that sum to at most 1, as only one child of "
            "a node can be the right one"
        )
    return chances


def _check_count(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{name}={value!r}; allowed: an integer from 1 to {most}")


def _seconds(step_time: Callable[[int], float] | Sequence[float], rows: int) -> list[float]:
    """Return the seconds of forwards of 1 to `rows` rows."""
    if callable(step_time):
        seconds = [float(step_time(n)) for n in range(1, rows + 1)]
    else:
        seconds = [float(value) for value in step_time[:rows]]
    if len(seconds) < rows:
        raise ConfigError(
            f"step_time has {len(seconds)} entries, {rows} are needed (the root and every node); lower max_nodes or "
            "pass a function"
        )
    if not all(math.isfinite(s) and s > 0 for s in seconds):
        raise ConfigError(f"step_time={seconds}; allowed: finite seconds above 0 for 1 to {rows} rows")
    return seconds
