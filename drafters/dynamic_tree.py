"""Trees that grow where the draft is sure (EAGLE-2). Shared by drafters that run a model; drafts nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.drafters.growing_trees import Expand, GrowingTrees, Grown, likeliest
from specdec.drafters.static_tree import MOST_NODES, check_sizes
from specdec.interfaces import DraftRequest


@dataclass(frozen=True)
class DynamicTree:
    """How far a tree may grow: `depth` levels of drafts, `top_k` nodes run per level, `total_tokens` with the root.

    `depth` is the length of the longest path and the number of forwards of the drafter's model. EAGLE's own option
    of that name counts one less; SGLang's `--speculative-num-steps`, `-eagle-topk` and `-num-draft-tokens` are these.

    Raises:
        ConfigError: a value is out of range.
    """

    LIMITS: ClassVar = {"depth": (1, 64), "top_k": (1, 64), "total_tokens": (2, MOST_NODES + 1)}

    depth: int = 5
    top_k: int = 10
    total_tokens: int = 60

    def __post_init__(self) -> None:
        check_sizes("dynamic tree", self)

    def num_nodes(self, max_draft_tokens: int) -> int:
        """Return the most draft tokens, root excluded, that a request with that limit gets."""
        return max(0, min(self.total_tokens - 1, max_draft_tokens))

    def num_rows(self, max_draft_tokens: int) -> int:
        """Return the most tokens that a growth runs through the model, root included: what to reserve KV for."""
        nodes = self.num_nodes(max_draft_tokens)
        # A node that is run is to have children in the tree, which also has the node's ancestors and its betters.
        return int(nodes > 0) + sum(max(0, min(self.top_k, nodes - level)) for level in range(1, self.depth))


def grow(
    requests: Sequence[DraftRequest],
    shape: DynamicTree,
    expand: Expand,
    vocab_size: int,
    draft_ids: Tensor | None = None,
) -> Grown:
    """Grow each request's tree level by level and keep its likeliest nodes.

    A node's score is the sum of log-probabilities along its path. On every level the `top_k` best nodes are run and
    all their `top_k` children remembered; of everything remembered the best nodes stay, as many as the request
    allows. A child never scores more than its parent, so these are a tree. Ties are won by what was found earlier.

    Nodes whose children cannot get into the tree any more are not run, which changes no tree: a small budget costs
    few rows and few levels.

    Args:
        requests: B requests. Trees are the same at every temperature; `min_confidence` is for chains.
        shape: of the largest tree.
        expand: runs the drafter's model, at most `shape.depth` times; it is given nothing for requests without budget.
        vocab_size: V of the target.
        draft_ids: [Vd] int64, the target's id of each draft id, if the drafter has a vocabulary of its own.

    Returns:
        Trees of point masses on the CPU (the children are not drawn), nodes in the order they were found; and the
        row of each node in the drafter's own cache.

    Source: Li et al. 2024, EAGLE-2, arXiv 2406.16858.
    """
    most = torch.tensor([shape.num_nodes(r.max_draft_tokens) for r in requests], dtype=torch.int64)
    width = max(1, min(shape.top_k, int(most.max())))
    num_columns = 1 + width + (shape.depth - 1) * shape.top_k * width
    trees = GrowingTrees(requests, num_columns, expand)
    scores = torch.full(trees.token_ids.shape, -torch.inf, dtype=torch.float64)
    scores[:, 0] = 0.0
    frontier, wanted = torch.zeros(len(requests), 1, dtype=torch.int64), (most > 0)[:, None]
    used = 1
    for level in range(1, shape.depth + 1):
        if not bool(wanted.any()):
            break
        values, ids = likeliest(trees.run(frontier, wanted), width, vocab_size, draft_ids)
        found = slice(used, used + frontier.shape[1] * values.shape[1])
        values += scores.gather(1, frontier)[wanted][:, None]
        scores[:, found] = _spread(values, wanted, -torch.inf)
        trees.token_ids[:, found] = _spread(ids, wanted, -1)
        trees.parents[:, found] = frontier.repeat_interleave(values.shape[1], dim=1)
        used = found.stop
        if level < shape.depth:
            frontier, wanted = _frontier(scores[:, :used], found.start, shape.top_k, most)
    order = scores[:, :used].sort(dim=1, descending=True, stable=True).indices
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    kept.scatter_(1, order, torch.arange(used) <= most[:, None])  # the root, which is the best node, and `most` others
    return trees.keep(kept & (scores > -torch.inf))


def _spread(values: Tensor, wanted: Tensor, fill: float) -> Tensor:
    """Return [B, F * W]: rows of `values` [R, W] where `wanted` [B, F] is true, `fill` elsewhere."""
    out = values.new_full((*wanted.shape, values.shape[1]), fill)
    out[wanted] = values
    return out.flatten(1)


def _frontier(scores: Tensor, begin: int, top_k: int, most: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the nodes to run next, best first.

    Args:
        scores: [B, N] float64 of everything remembered, -inf where there is no node.
        begin: first column of the newest level.
        top_k: how many at most.
        most: [B] int64 nodes that stay in the end, root excluded.

    Returns:
        [B, F] columns; [B, F] bool, whether such a node can have a child in the tree: a child comes behind all that
        score at least what its parent scores, parent and root included.
    """
    newest, order = scores[:, begin:].sort(dim=1, descending=True, stable=True)
    newest, order = newest[:, :top_k], order[:, :top_k]
    num_better = (scores[:, None, :] >= newest[:, :, None]).sum(dim=-1)
    wanted = (num_better <= most[:, None]) & (newest > -torch.inf)
    longest = int(wanted.sum(dim=1).max())  # in every row the wanted ones come first
    return begin + order[:, :longest], wanted[:, :longest]
