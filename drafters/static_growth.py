"""Trees of a fixed shape grown level by level by a model. Shared by drafters that run one; drafts nothing itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.drafters.autoregression import fit_vocabulary, spread
from specdec.drafters.growing_trees import Expand, GrowingTrees, Grown, likeliest
from specdec.drafters.static_tree import Path, StaticTree
from specdec.interfaces import DraftRequest, Noise, NoiseKey, Stream
from specdec.sampling import probabilities


class _Level(NamedTuple):
    """The nodes of one depth that have children, and the children: L nodes with at most C children each."""

    parents: Tensor  # [L] nodes
    children: Tensor  # [L, C] nodes in drawn order, -1 = no more
    ranks: Tensor  # [L, C] of the children
    places: Tensor  # [L, C] of the children among all nodes of their depth


def num_rows(tree: StaticTree, max_draft_tokens: int) -> int:
    """Return how many tokens growing the tree runs through the model, root included: what to reserve KV for."""
    return len(set(tree.fit(max_draft_tokens).parents)) - 1 if max_draft_tokens > 0 else 0


def grow_static(
    requests: Sequence[DraftRequest],
    tree: StaticTree,
    expand: Expand,
    vocab_size: int,
    draft_ids: Tensor | None = None,
) -> Grown:
    """Draft the likeliest tokens along the paths of `tree`.

    Only nodes that have children are run. A rank the model has no token for is left out with everything below it.

    Args:
        requests: B requests; each gets the first `max_draft_tokens` nodes.
        tree: its paths.
        expand: runs the drafter's model, at most `tree.depth` times.
        vocab_size: V of the target.
        draft_ids: [Vd] int64, the target's id of each draft id, if the drafter has a vocabulary of its own.

    Returns:
        Trees of point masses on the CPU, nodes in the tree's order; and the row of each node (see `Grown`).
    """
    return _Growth(requests, tree, expand, vocab_size, draft_ids).grow(None)


def grow_sampled(
    requests: Sequence[DraftRequest],
    tree: StaticTree,
    expand: Expand,
    noise: Noise,
    vocab_size: int,
    draft_ids: Tensor | None = None,
) -> Grown:
    """Draw the tokens of `tree` from the model's own distributions, siblings without replacement.

    The distributions are shaped by each request's sampling options and kept as draft_probs. The k-th child of a node,
    in the tree's order, is the k-th draw: ranks say only which subtree hangs below it. Where a distribution has fewer
    tokens than a node has children, the others are left out with everything below them. Which nodes there are depends
    on the distributions, never on what is drawn besides the path to a node. Greedy requests are grown as
    `grow_static` does.

    Args:
        requests: B requests; each gets the first `max_draft_tokens` nodes.
        tree: its paths.
        expand: runs the drafter's model, at most `tree.depth` times.
        noise: of this step. A child's index is its place in its depth, so every draw of a step is another one; that
            of the leftmost node is 0, as on a chain, and coupled with the target's where that is wanted.
        vocab_size: V of the target.
        draft_ids: [Vd] int64, the target's id of each draft id, if the drafter has a vocabulary of its own.

    Returns:
        Trees with draft_probs and draft_row, nodes in the tree's order; and the row of each node (see `Grown`).

    Source: Chen et al. 2024, Sequoia, arXiv 2402.12374 (sampling without replacement).
    """
    return _Growth(requests, tree, expand, vocab_size, draft_ids).grow(noise)


class _Growth:
    """One growth of a batch; a node's column is its number in the static tree."""

    def __init__(
        self,
        requests: Sequence[DraftRequest],
        tree: StaticTree,
        expand: Expand,
        vocab_size: int,
        draft_ids: Tensor | None,
    ) -> None:
        self._requests, self._levels, self._width = requests, _levels(tree.paths), tree.width
        self._vocab_size, self._draft_ids = vocab_size, draft_ids
        self._most = torch.tensor([min(len(tree), r.max_draft_tokens) for r in requests], dtype=torch.int64)
        self._trees = GrowingTrees(requests, len(tree) + 1, expand)
        self._draft_row = torch.full_like(self._trees.token_ids, -1)
        self._draft_probs: list[Tensor] = []

    def grow(self, noise: Noise | None) -> Grown:
        """Grow level by level; without noise nothing is drawn."""
        trees = self._trees
        is_drawn = torch.tensor([noise is not None and not r.sampling.greedy for r in self._requests])
        for depth, level in enumerate(self._levels):
            fits = (level.children >= 0) & (level.children <= self._most[:, None, None])  # [B, L, C]
            wanted = fits[:, :, 0] & (trees.token_ids[:, level.parents] >= 0)
            if not bool(wanted.any()):
                break
            logits = trees.run(level.parents.expand(wanted.shape), wanted)
            request, place = wanted.nonzero(as_tuple=True)
            found = torch.full((len(request), level.children.shape[1]), -1, dtype=torch.int64)
            ranked, drawn = (~is_drawn[request]).nonzero()[:, 0], is_drawn[request].nonzero()[:, 0]
            if ranked.numel():
                rows = logits if not drawn.numel() else logits[ranked.to(logits.device)]
                found[ranked] = self._likeliest(rows, level.ranks[place[ranked]])
            if noise is not None and drawn.numel():
                rows = logits if not ranked.numel() else logits[drawn.to(logits.device)]
                probs = self._keep_probs(rows, request[drawn], level.parents[place[drawn]])
                keys = NoiseKey(request[drawn], depth + 1, Stream.DRAFT, level.places[place[drawn]])
                found[drawn] = _draw(probs, fits[request, place][drawn], noise, keys)
            row, ordinal = fits[wanted].nonzero(as_tuple=True)
            child = level.children[place[row], ordinal]
            trees.token_ids[request[row], child] = found[row, ordinal]
            trees.parents[request[row], child] = level.parents[place[row]]
        kept = trees.token_ids >= 0
        if not self._draft_probs:
            return trees.keep(kept)
        return trees.keep(kept, self._draft_row, torch.cat(self._draft_probs))

    def _likeliest(self, logits: Tensor, ranks: Tensor) -> Tensor:
        """Return [R, C] the tokens of the given `ranks` [R, C], -1 where there is none."""
        values, ids = likeliest(logits, self._width, self._vocab_size, self._draft_ids)
        ids = ids.masked_fill(values == -torch.inf, -1)
        exists = (ranks >= 0) & (ranks < ids.shape[1])
        return torch.where(exists, ids.gather(1, torch.where(exists, ranks, 0)), -1)

    def _keep_probs(self, logits: Tensor, request: Tensor, nodes: Tensor) -> Tensor:
        """Return [n, V] float32 distributions of the target's tokens, kept as those of the children of `nodes` [n]."""
        sampling = [self._requests[i].sampling for i in request.tolist()]
        ids = self._draft_ids
        own = fit_vocabulary(logits, self._vocab_size if ids is None else ids.shape[0])
        probs = spread(probabilities(own, sampling), self._vocab_size, ids)
        begin = sum(len(kept) for kept in self._draft_probs)
        self._draft_row[request, nodes] = torch.arange(begin, begin + len(probs))
        self._draft_probs.append(probs)
        return probs


def _draw(probs: Tensor, fits: Tensor, noise: Noise, keys: NoiseKey) -> Tensor:
    """Draw siblings without replacement.

    Args:
        probs: [n, V] of each parent.
        fits: [n, C] bool, which children it is to have.
        noise: of this step.
        keys: of the draws, with `index` [n, C].

    Returns:
        [n, C] int64 on the CPU, -1 where there is no child or nothing left to draw.
    """
    # Nothing can be drawn from NaN. The NaN row stays with the tokens, so the engine drops and counts the draft.
    weights = torch.where(probs.sum(dim=-1, keepdim=True).isnan(), 1.0, probs)
    found = torch.full(fits.shape, -1, dtype=torch.int64)
    index = torch.as_tensor(keys.index)
    for ordinal in range(fits.shape[1]):
        open_ = (fits[:, ordinal] & (weights.amax(dim=-1) > 0).cpu()).nonzero()[:, 0]
        if not open_.numel():
            break
        rows = open_.to(weights.device)
        key = NoiseKey(
            keys.rows[open_].to(rows.device), keys.offset, keys.stream, index[open_, ordinal].to(rows.device)
        )
        tokens = noise.choose(weights if len(rows) == len(weights) else weights[rows], key).to(weights.device)
        weights[rows, tokens] = 0.0
        found[open_, ordinal] = tokens.cpu()
    return found


@lru_cache(maxsize=16)
def _levels(paths: tuple[Path, ...]) -> tuple[_Level, ...]:
    """Return the levels of a tree from the root's on, without the last."""
    tree = StaticTree(paths)
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents[1:], 1):
        below.setdefault(parent, []).append(node)
    found = []
    for nodes, next_nodes in itertools.pairwise(tree.levels()):
        parents = [node for node in nodes if node in below]
        most = max(len(below[node]) for node in parents)
        children = torch.tensor([below[node] + [-1] * (most - len(below[node])) for node in parents])
        place = {node: i for i, node in enumerate(next_nodes)}
        places = torch.tensor([[place.get(node, -1) for node in row] for row in children.tolist()])
        ranks = torch.where(children >= 0, torch.tensor(tree.ranks)[children.clamp_min(0)], -1)
        found.append(_Level(torch.tensor(parents), children, ranks, places))
    return tuple(found)
