"""Traversal verification: accept or refuse whole root paths, from the leaves upward."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.interfaces import Noise, NoiseKey, Stream, TargetRows, TokenTree, VerifyResult
from specdec.tree import children_table, depths, paths_to
from specdec.verifiers.walk import follow_argmax


class TraversalVerifier:
    """Accept the first whole path that passes, leaves before their parents; never fewer tokens than rejection.

    Every node has a ratio w: 1 at the root, min(1, w(parent) * p(x) / q(x)) at a child x of a node with target
    distribution p that was drawn from q. The tree is left bottom up, siblings in drawn order. A node without children
    left is accepted, with its path, with probability w. If it is refused, then at its parent, with s the sum of
    max(0, w * p - q): p becomes max(0, w * p - q) normalised, w becomes s / (s + 1 - w) and, where siblings were drawn
    without replacement, q becomes q without x normalised. The token after the path comes from the p of its last node.
    A point-mass child is the case q(x) = 1.

    On a chain this is block verification. For point masses it accepts as many tokens as `rejection`.

    Source: Weng et al. 2025, arXiv 2505.12398 (traversal verification); Sun et al. 2024, arXiv 2403.10444, algorithm 2
    (block verification).
    """

    name = "traversal"
    lossless = True
    needs_all_rows = True
    couples_draft = False  # nothing to gain: drafts are accepted by their probability, not by being the target's draw

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        """Traverse every tree of the step.

        Args:
            tree: B requests, M nodes; `draft_probs` holds exactly what the children were drawn from.
            target: asked at most once per node, for nodes with children on the way down and for accepted leaves.
            noise: asked under PATH at offset 0 with the node as index, since nodes behind the emitted tokens are
                judged too: keyed by their own positions, the next step would meet these draws again. The token after
                the path is asked for at its own position, under TOKEN behind a leaf of the tree, else RESIDUAL.

        Returns:
            The accepted paths and the token after each of them.
        """
        greedy = follow_argmax(tree, target)
        if greedy is not None:
            return greedy
        traversal = _Traversal(tree, target, noise)
        while traversal.rows.numel():
            traversal.turn()
        path, num_accepted = paths_to(tree.parents, traversal.nodes)
        return VerifyResult(path, num_accepted, traversal.next_token_ids)


class _Traversal:
    """Where each request stands in its tree: one node, and what is left of p and q at the nodes above it.

    A ratio w is kept as a pair with den in [1/2, 1), and p as weights with their total in [1/2, 1): nothing is ever
    divided, so that dyadic weights stay exact and long rows of siblings do not underflow.
    """

    def __init__(self, tree: TokenTree, target: TargetRows, noise: Noise) -> None:
        self.tree, self.target, self.noise = tree, target, noise
        children = children_table(tree)
        self.children = torch.nn.functional.pad(children, (0, 1), value=-1)  # [B, M, C + 1]: there is always an end
        self.rows = torch.arange(tree.num_nodes.shape[0], device=tree.num_nodes.device)  # those still on their way
        self.nodes = torch.zeros_like(tree.num_nodes)
        self.level = torch.zeros_like(tree.num_nodes)  # depth of the node
        self.next_token_ids = torch.zeros_like(tree.num_nodes)
        self.tried = torch.zeros_like(tree.parents)  # [B, M]: children of each node that are behind us
        self.num = torch.full_like(tree.parents, 0.5, dtype=torch.float64)  # [B, M]: w = num / den, 1 at the roots
        self.den = self.num.clone()
        is_inner = self.children[:, :, 0] >= 0
        self.num_levels = int((depths(tree.parents) + 1)[is_inner].amax()) if bool(is_inner.any()) else 0
        self.left: Tensor | None = None  # [B, levels, V] float64: what is left of p at the nodes above and at this one
        self.total = self.num.new_zeros(self.nodes.shape[0], self.num_levels)  # its sums
        self._load(self.rows)

    def turn(self) -> None:
        """Take every request one node down, or decide about the node it is at."""
        rows, here = self.rows, self.nodes[self.rows]
        child = self.children[rows, here, self.tried[rows, here]]
        down = (child >= 0) & (self.num[rows, here] > 0)  # below w = 0 nothing can be accepted
        if bool(down.any()):
            self._descend(rows[down], here[down], child[down])
        if not bool(down.all()):
            rows, here = rows[~down], here[~down]
            key = NoiseKey(rows, 0, Stream.PATH, here)
            accepted = (here == 0) | self.noise.accept(self.num[rows, here], self.den[rows, here], key)
            self._finish(rows[accepted], here[accepted])
            self._refuse(rows[~accepted], here[~accepted])
            going_on = down.clone()
            going_on[~down] = ~accepted
            self.rows = self.rows[going_on]

    def _load(self, rows: Tensor) -> None:
        """Get p at the nodes of `rows` that have children and may be accepted."""
        here = self.nodes[rows]
        rows = rows[(self.children[rows, here, 0] >= 0) & (self.num[rows, here] > 0)]
        if not rows.numel():
            return
        probs = self.target.probs(rows, self.nodes[rows]).to(torch.float64)
        if self.left is None:
            self.left = probs.new_zeros(*self.total.shape, probs.shape[1])
        self._keep(rows, self.level[rows], probs)

    def _keep(self, rows: Tensor, level: Tensor, weights: Tensor) -> None:
        """Store p as weights [n, V] scaled by a power of two, which changes no bits; all zeros stay so."""
        assert self.left is not None, "loaded on the way down"
        total = weights.sum(dim=1)
        exponent = -torch.frexp(total).exponent
        self.left[rows, level] = torch.ldexp(weights, exponent[:, None])
        self.total[rows, level] = torch.ldexp(total, exponent)

    def _descend(self, rows: Tensor, nodes: Tensor, child: Tensor) -> None:
        """Go to the next child of each node [n]; one that q cannot draw any more is passed over with its subtree."""
        assert self.left is not None, "loaded on the way down"
        level, tokens = self.level[rows], self.tree.token_ids[rows, child]
        draft = self._drawn_from(rows, nodes, tokens)
        draft_weight = draft.gather(1, tokens[:, None])[:, 0]
        num = self.num[rows, nodes] * self.left[rows, level, tokens] * draft.sum(dim=1)
        den = self.den[rows, nodes] * self.total[rows, level] * draft_weight
        drawable = draft_weight > 0
        self.tried[rows[~drawable], nodes[~drawable]] += 1
        rows, child = rows[drawable], child[drawable]
        self._set_ratio(rows, child, torch.minimum(num, den)[drawable], den[drawable])
        self.nodes[rows] = child
        self.level[rows] += 1
        self._load(rows)

    def _refuse(self, rows: Tensor, nodes: Tensor) -> None:
        """Delete nodes [n] and go back to their parents, whose p and w lose what the node has covered."""
        if not rows.numel():
            return
        assert self.left is not None, "loaded on the way down"
        parent, level = self.tree.parents[rows, nodes], self.level[rows] - 1
        draft = self._drawn_from(rows, parent, self.tree.token_ids[rows, nodes])
        draft_total, total = draft.sum(dim=1), self.total[rows, level]
        num, den = self.num[rows, parent], self.den[rows, parent]
        left = self.left[rows, level] * (num * draft_total)[:, None]
        left.sub_(draft.mul_((den * total)[:, None])).clamp_min_(0.0)
        mass = left.sum(dim=1)
        new_den = mass + (den - num) * total * draft_total
        # w = 1 and nothing left: p and q are equal up to rounding, the refusal had no probability beyond it, and p is
        # as good an answer as there is.
        known = new_den > 0
        self._keep(rows[known], level[known], left[known])
        self._set_ratio(rows[known], parent[known], mass[known], new_den[known])
        self.tried[rows, parent] += 1
        self.nodes[rows] = parent
        self.level[rows] = level

    def _finish(self, rows: Tensor, nodes: Tensor) -> None:
        """Accept nodes [n] with their paths and choose the tokens after them."""
        is_leaf = self.children[rows, nodes, 0] < 0
        for chosen, stream in ((is_leaf, Stream.TOKEN), (~is_leaf, Stream.RESIDUAL)):
            ends = rows[chosen]
            if not ends.numel():
                continue
            level = self.level[ends]
            if stream is Stream.TOKEN:
                weights = self.target.probs(ends, nodes[chosen])
            else:
                assert self.left is not None, "loaded on the way down"
                weights = self.left[ends, level]
            self.next_token_ids[ends] = self.noise.choose(weights, NoiseKey(ends, level + 1, stream))

    def _set_ratio(self, rows: Tensor, nodes: Tensor, num: Tensor, den: Tensor) -> None:
        exponent = -torch.frexp(den).exponent
        self.num[rows, nodes] = torch.ldexp(num, exponent)
        self.den[rows, nodes] = torch.ldexp(den, exponent)

    def _drawn_from(self, rows: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Return [n, V] float64, what the current children `tokens` of the nodes were drawn from, not normalised."""
        assert self.left is not None, "loaded on the way down"
        tree = self.tree
        if tree.draft_probs is None or tree.draft_row is None:
            return self.left.new_zeros(rows.shape[0], self.left.shape[2]).scatter_(1, tokens[:, None], 1.0)
        source = tree.draft_row[rows, nodes]
        draft = tree.draft_probs[source.clamp_min(0)].to(torch.float64)
        if not tree.with_replacement:
            siblings = self.children[rows, nodes]
            ordinals = torch.arange(siblings.shape[1], device=siblings.device)
            which, ordinal = (ordinals < self.tried[rows, nodes][:, None]).nonzero(as_tuple=True)
            if which.numel():
                draft[which, tree.token_ids[rows[which], siblings[which, ordinal]]] = 0.0
        is_point = source < 0
        if bool(is_point.any()):
            draft.masked_fill_(is_point[:, None], 0.0)
            draft[is_point.nonzero()[:, 0], tokens[is_point]] = 1.0
        return draft
