"""Trees of a fixed shape: which of a node's likeliest children are drafted. Shared by drafters; drafts nothing itself.

A node is named by its path of ranks from the root: (0, 2) is the third likeliest child of the likeliest child.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.interfaces import DrafterContext

Path = tuple[int, ...]

MOST_NODES = 1024
# One word of ranks per node, the likeliest nodes first (by `_expected`, Medusa's in its own order), so that any
# beginning is a good smaller tree. Sources: token recycling: Luo et al. 2024, arXiv 2408.08696, as in Spec-Bench;
# Medusa: Cai et al. 2024, arXiv 2401.10774, `mc_sim_7b_63`; EAGLE: Li et al. 2024, arXiv 2401.15077.
PRESETS = {
    "recycling": "0 00 1 000 2 01 10 0000 3 02 20 001 010 100 4 00000 5 03 11 30 6 002 020 200 0001 0010 0100 1000 04 "
    "40 7 000000 05 12 21 50 003 011 030 101 110 300 06 60 0002 0020 0200 2000 00001 00010 00100 01000 10000 004 040 "
    "400 13 31 07 70 22 005 012 021 050 500 0003 0011 0030 3000 006 060 00020 00002 000001 000100 0004 0040 007 070",
    "medusa": "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 "
    "005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070",
    "eagle": "0 00 1 000 2 01 10 0000 3 02 20 001 010 100 00000 11 30 002 020 0001 21 011 0002 00001 021",
}
ALLOWED = (
    f"a name ({', '.join(sorted(PRESETS))}), numbers of children per depth such as [3, 2, 1], or a list of paths of "
    "ranks such as [[0], [1], [0, 0]]"
)


class StaticTree:
    """The paths of a tree in the order in which they are worth drafting; a node comes after its parent.

    `parents` and `ranks` have one entry per node, the root (node 0: -1, 0) included.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths: tuple[Path, ...] = tuple(paths)
        numbers: dict[Path, int] = {(): 0}
        self.parents, self.ranks = [-1], [0]
        for path in self.paths:
            self.parents.append(numbers[path[:-1]])
            self.ranks.append(path[-1])
            numbers[path] = len(numbers)

    def __len__(self) -> int:
        """Return the number of nodes, root excluded."""
        return len(self.paths)

    @property
    def width(self) -> int:
        """Candidates a node needs: the largest rank and one."""
        return max(self.ranks) + 1

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    def fit(self, max_nodes: int) -> StaticTree:
        """Return the tree of the first `max_nodes` nodes, root excluded."""
        return self if max_nodes >= len(self) else StaticTree(self.paths[:max_nodes])

    def levels(self) -> list[list[int]]:
        """Return the nodes of each depth, the root's first."""
        found: list[list[int]] = [[0], *([] for _ in range(self.depth))]
        for node, path in enumerate(self.paths, 1):
            found[len(path)].append(node)
        return found


def chain_of(length: int) -> StaticTree:
    """Return the chain of always the likeliest child."""
    return StaticTree((0,) * depth for depth in range(1, length + 1))


def static_tree(tree: Any) -> StaticTree:
    """Return the tree that an option names or spells out.

    Args:
        tree: a preset's name; numbers of children of every node per depth; or paths, of which the first ones are
            taken where there is no room for all.

    Raises:
        ConfigError: it is neither, or a path has no parent.
    """
    if isinstance(tree, str):
        if tree not in PRESETS:
            raise ConfigError(f"tree={tree!r}; allowed: {ALLOWED}")
        return StaticTree(tuple(map(int, word)) for word in PRESETS[tree].split())
    if not isinstance(tree, Sequence) or not tree:
        raise ConfigError(f"tree={tree!r}; allowed: {ALLOWED}")
    if all(_is_count(entry) and entry >= 1 for entry in tree):
        return StaticTree(_full(tree))
    for path in tree:
        if not isinstance(path, Sequence) or isinstance(path, str) or not path or not all(map(_is_count, path)):
            raise ConfigError(f"tree has {path!r}; allowed: {ALLOWED}")
    return StaticTree(_closed([tuple(path) for path in tree]))


def refuse_trees_on_chains(name: str, context: DrafterContext, instead: str) -> None:
    """Raise IncompatibleDrafterError if the target of `context` runs chains only."""
    if not context.runner.supports_trees:
        raise IncompatibleDrafterError(
            f"drafter {name!r} was asked for trees, but this target's attention runs chains only; {instead}"
        )


def check_sizes(what: str, shape: Any) -> None:
    """Raise ConfigError unless the fields of a dataclass are whole numbers within its `LIMITS` of the same names."""
    for name, (least, most) in shape.LIMITS.items():
        value = getattr(shape, name)
        if not _is_count(value) or not least <= value <= most:
            raise ConfigError(
                f"{what}: {name}={value!r}; allowed: an integer from {least} to {most}"
                + (" (it counts the root: one more than the draft tokens)" if name == "total_tokens" else "")
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _full(widths: Sequence[int]) -> list[Path]:
    """Return all paths of a tree with the same number of children everywhere at a depth, the likeliest first."""
    level: list[Path] = [()]
    paths: list[Path] = []
    for width in widths:
        if len(paths) + len(level) * width > MOST_NODES:
            raise ConfigError(f"tree={list(widths)!r} has more than {MOST_NODES} nodes; lower the numbers of children")
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return sorted(paths, key=_expected, reverse=True)


def _expected(path: Path) -> float:
    """Return a rough chance that a node is accepted: 0.6 for the likeliest child, falling with the rank."""
    chance = 1.0
    for rank in path:
        chance *= 0.6 / (1 + rank) ** 1.2
    return chance


def _closed(paths: list[Path]) -> list[Path]:
    """Return the paths with parents moved before their children."""
    if len(paths) > MOST_NODES:
        raise ConfigError(f"tree has {len(paths)} paths; allowed: at most {MOST_NODES}")
    given = set(paths)
    if len(given) < len(paths):
        twice = next(path for i, path in enumerate(paths) if path in paths[:i])
        raise ConfigError(f"tree has the path {list(twice)} twice; leave one out")
    ordered: dict[Path, None] = {}
    for path in paths:
        for length in range(1, len(path) + 1):
            if path[:length] not in given:
                raise ConfigError(
                    f"tree has the path {list(path)} without its parent {list(path[:length])}; add that path"
                )
            ordered[path[:length]] = None
    return list(ordered)
