"""Recursive rejection sampling: accept a draft token with the ratio of the target's to the draft's probability."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.interfaces import Noise, NoiseKey, Stream, TargetRows, TokenTree, VerifyResult
from specdec.tree import children_table, paths_to


class RejectionVerifier:
    """Accept drawn children with min(1, p / q), otherwise move p to what the rejected child has not covered.

    At a node with target distribution p the children are tried in drawn order. A child x drawn from q is accepted
    with probability min(1, p(x) / q(x)); a rejection replaces p by max(0, p - q) normalised and, where siblings were
    drawn without replacement, q by q without x normalised. A point-mass child is the case q(x) = 1. When no child is
    left the token comes from what remains of p. A node without children draws from p itself.

    On a chain this is the rule of Leviathan et al. and Chen et al.

    Source: Leviathan, Kalman and Matias 2022, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318,
    algorithm 2. Trees: siblings with replacement are the multi-step speculative sampling of Miao et al. 2023, arXiv
    2305.09781 (SpecInfer); without, the sampling and verification of Chen et al. 2024, arXiv 2402.12374 (Sequoia).
    """

    name = "rejection"
    lossless = True
    needs_all_rows = False
    couples_draft = False  # nothing to gain: drafts are accepted by their probability, not by being the target's draw

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        """Walk every tree of the step down from its root.

        Args:
            tree: B requests, M nodes; `draft_probs` holds exactly what the children were drawn from.
            target: asked once per depth, for the current node of every request still walking.
            noise: asked at offset depth + 1 under ACCEPT with the sibling's ordinal as index, then under RESIDUAL
                after rejections or TOKEN at a leaf. No draw beyond the emitted token is used, so the next step
                meets fresh ones.

        Returns:
            The accepted paths and the token after each of them.
        """
        children = children_table(tree)
        nodes = torch.zeros_like(tree.num_nodes)
        next_token_ids = torch.zeros_like(nodes)
        rows = torch.arange(nodes.shape[0], device=nodes.device)
        offset = 1
        while rows.numel():
            here = nodes[rows]
            target_probs = target.probs(rows, here)
            is_leaf = (children[rows, here] < 0).all(dim=1)
            if bool(is_leaf.any()):
                key = NoiseKey(rows[is_leaf], offset, Stream.TOKEN)
                next_token_ids[key.rows] = noise.choose(_rows(target_probs, is_leaf), key)
            rows, here, target_probs = rows[~is_leaf], here[~is_leaf], _rows(target_probs, ~is_leaf)
            if not rows.numel():
                break
            child, remaining = _try_children(tree, children, rows, here, target_probs, noise, offset)
            found = child >= 0
            if remaining.shape[0]:
                key = NoiseKey(rows[~found], offset, Stream.RESIDUAL)
                next_token_ids[key.rows] = noise.choose(remaining, key)
            rows = rows[found]
            nodes[rows] = child[found]
            offset += 1
        path, num_accepted = paths_to(tree.parents, nodes)
        return VerifyResult(path, num_accepted, next_token_ids)


def _rows(values: Tensor, wanted: Tensor) -> Tensor:
    """Return the `wanted` [L] bool rows of [L, V]; a vocabulary is worth not copying when that is all of them."""
    return values if bool(wanted.all()) else values[wanted]


def _try_children(
    tree: TokenTree, children: Tensor, rows: Tensor, nodes: Tensor, target: Tensor, noise: Noise, offset: int
) -> tuple[Tensor, Tensor]:
    """Try the children of one node per request, one sibling after the other.

    Args:
        tree: the step's trees.
        children: [B, M, C] from `children_table`.
        rows: [L] requests.
        nodes: [L] their current nodes, none of them a leaf.
        target: [L, V] target distributions after them, any float dtype.
        noise: the step's noise.
        offset: depth of the children.

    Returns:
        [L] int64 accepted child or -1; and for those with -1, in order, the distribution [n, V] that is left of the
        target's, unnormalised.
    """
    accepted = torch.full_like(rows, -1)
    siblings = children[rows, nodes]
    places = torch.arange(rows.shape[0], device=rows.device)  # of the rows below, which have no child yet
    draft, is_point = _draft_rows(tree, rows, nodes, target)
    for ordinal in range(siblings.shape[1]):
        child = siblings[places, ordinal]
        tried = (child >= 0).nonzero()[:, 0]
        if not tried.numel():
            break
        tokens = tree.token_ids[rows[places[tried]], child[tried]]
        target_total = target.sum(dim=1, dtype=torch.float64)[tried]
        draft_total = draft.sum(dim=1, dtype=torch.float64)[tried].masked_fill(is_point[tried], 1.0)
        # p(x) / q(x) with both normalised, cross-multiplied: no division rounds, and dyadic weights stay exact.
        num = target[tried, tokens].to(torch.float64) * draft_total
        den = draft[tried, tokens].to(torch.float64).masked_fill(is_point[tried], 1.0) * target_total
        drawable = den > 0  # a child q cannot produce was not drawn from q: it is passed over and p stays
        key = NoiseKey(rows[places[tried]], offset, Stream.ACCEPT, ordinal)
        passed = noise.accept(num, den, key) & drawable
        accepted[places[tried[passed]]] = child[tried[passed]]

        refused = ~passed & drawable
        if bool(refused.any()):
            tokens, where = tokens[refused], tried[refused]
            covered = _covered(draft[where], tokens, is_point[where])
            left = _residual(target[where], target_total[refused], covered, draft_total[refused])
            target = target.to(torch.float64).index_copy(0, where, left)
            if not tree.with_replacement:
                draft = draft.index_put((where, tokens), draft.new_zeros(()))
        open_ = accepted[places] < 0
        places, is_point = places[open_], is_point[open_]
        target, draft = _rows(target, open_), _rows(draft, open_)
    return accepted, target


def _draft_rows(tree: TokenTree, rows: Tensor, nodes: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the nodes' children were drawn from, [L, V], and [L] bool: point masses, whose rows mean nothing."""
    if tree.draft_probs is None or tree.draft_row is None:
        return like.new_zeros(1, 1).expand_as(like), torch.ones_like(rows, dtype=torch.bool)
    draft_row = tree.draft_row[rows, nodes]
    return tree.draft_probs[draft_row.clamp_min(0)], draft_row < 0


def _covered(draft: Tensor, tokens: Tensor, is_point: Tensor) -> Tensor:
    """Return [n, V] float64, what a refused child was drawn from: `draft`, or one-hot at `tokens` [n]."""
    draft = draft.to(torch.float64)
    if bool(is_point.any()):
        one_hot = torch.zeros_like(draft).scatter_(1, tokens[:, None], 1.0)
        draft = torch.where(is_point[:, None], one_hot, draft)
    return draft


def _residual(target: Tensor, target_total: Tensor, draft: Tensor, draft_total: Tensor) -> Tensor:
    """Return max(0, p - q) for weights [n, V] with totals [n]: float64, its sum scaled into [1/2, 1).

    Where nothing is left, p and q are equal up to rounding: the refusal itself had no probability beyond rounding,
    and p is as good an answer as there is.
    """
    target = target.to(torch.float64)
    left = (target * draft_total[:, None]).sub_(draft * target_total[:, None]).clamp_min_(0.0)
    total = left.sum(dim=1)
    is_empty = total <= 0
    if bool(is_empty.any()):
        left = torch.where(is_empty[:, None], target, left)
        total = torch.where(is_empty, target_total, total)
    # Powers of two change no bits, and a long row of siblings would otherwise shrink the weights to nothing.
    return torch.ldexp(left, -torch.frexp(total).exponent[:, None])
