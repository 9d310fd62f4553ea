"""Trees for heads that guess all places at once, each for itself. Shared by drafters; drafts nothing itself.

A node is a head, which is its depth less one, and a rank among that head's guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.drafters.static_tree import MOST_NODES, StaticTree, check_sizes


class Nodes(NamedTuple):
    """Trees of a batch, the root (node 0: -1, 0, 0) included. Every beginning of one is a tree."""

    parents: Tensor  # [B, M] int64
    heads: Tensor  # [B, M] int64
    ranks: Tensor  # [B, M] int64


class FixedTree:
    """The same nodes in every step: those of a static tree, in its order."""

    def __init__(self, tree: StaticTree) -> None:
        self.tree = tree
        heads = [0, *(len(path) - 1 for path in tree.paths)]
        self._nodes = Nodes(*torch.tensor([tree.parents, heads, tree.ranks])[:, None])
        self._num_heads = [head + 1 for head in accumulate(heads, max)]
        self._width = [rank + 1 for rank in accumulate(tree.ranks, max)]

    def extent(self, num_nodes: int) -> tuple[int, int]:
        """Return how many heads, and how many guesses of each, a tree of so many draft tokens needs."""
        last = min(num_nodes, len(self.tree))
        return self._num_heads[last], self._width[last]

    def nodes(self, log_probs: Tensor, num_nodes: int) -> Nodes:
        """Return the first nodes of the tree; see `ProductTree.nodes`."""
        batch = log_probs.shape[0]
        parents, heads, ranks = (values[:, : num_nodes + 1].expand(batch, -1) for values in self._nodes)
        return Nodes(parents, heads, ranks)


@dataclass(frozen=True)
class ProductTree:
    """The likeliest paths of each step, by the product of the heads' own probabilities.

    `top_k` guesses of each head take part; `total_tokens` is the size of the tree with its root.

    Raises:
        ConfigError: a value is out of range.
    """

    LIMITS: ClassVar = {"top_k": (1, 64), "total_tokens": (2, MOST_NODES + 1)}

    top_k: int = 10
    total_tokens: int = 64

    def __post_init__(self) -> None:
        check_sizes("tree", self)

    def extent(self, num_nodes: int) -> tuple[int, int]:
        """Return how many heads, and how many guesses of each, a tree of so many draft tokens may need."""
        num_nodes = min(num_nodes, self.total_tokens - 1)
        return num_nodes, min(self.top_k, num_nodes)

    def nodes(self, log_probs: Tensor, num_nodes: int) -> Nodes:
        """Return the likeliest paths, best first.

        No path is likelier than its beginning, so the best ones are a tree. Ties go to the shorter path, then to the
        lower ranks; paths of no chance come last.

        Args:
            log_probs: [B, heads, ranks] float64 <= 0 of each head's guesses, best first; -inf = there is none.
            num_nodes: draft tokens at most.
        """
        num_nodes = min(num_nodes, self.total_tokens - 1)
        batch, num_heads, width = log_probs.shape
        level = log_probs.new_zeros(batch, 1)
        root = torch.zeros(batch, 1, dtype=torch.int64)
        scores, parents, heads, ranks = [level], [root - 1], [root], [root]
        begin = 0
        for head in range(num_heads):
            # The best nodes of a depth are children of the best nodes above it.
            children = (level[:, :, None] + log_probs[:, head, None, :]).flatten(1)
            level_begin, begin = begin, begin + level.shape[1]
            level, order = (values[:, :num_nodes] for values in children.sort(dim=1, descending=True, stable=True))
            scores.append(level)
            parents.append(level_begin + order // width)
            heads.append(torch.full_like(order, head))
            ranks.append(order % width)
        order = torch.cat(scores, dim=1).sort(dim=1, descending=True, stable=True).indices
        place = order.argsort(dim=1)  # of each column in `order`
        order = order[:, : num_nodes + 1]
        above = torch.cat(parents, dim=1).gather(1, order)
        return Nodes(
            torch.where(above >= 0, place.gather(1, above.clamp_min(0)), -1),
            torch.cat(heads, dim=1).gather(1, order),
            torch.cat(ranks, dim=1).gather(1, order),
        )
