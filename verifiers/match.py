"""Draw the target's own token at each node and follow the draft while it holds that token."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.interfaces import Noise, NoiseKey, Stream, TargetRows, TokenTree, VerifyResult
from specdec.tree import children_table, paths_to


class MatchVerifier:
    """Accept a draft token exactly when it is the token the target draws at its place.

    The token drawn never depends on the draft, so any tree is verified without loss, whatever its tokens came from,
    and with noise keyed by position the output equals the undrafted run's. For point-mass drafts it accepts as much
    as rejection sampling; for sampled drafts it accepts the sum of p * q instead of min(p, q), unless the drafter
    draws with the same noise (`couples_draft`).

    Source: the target-token form of EAGLE-2's tree rule, Li et al. 2024, arXiv 2406.16858, evaluate_posterior;
    the Gumbel coupling of draft and target is Daliri, Musco and Suresh 2024, arXiv 2408.07978.
    """

    name = "match"
    lossless = True
    needs_all_rows = False
    couples_draft = True

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        """Walk every tree of the step down from its root.

        Args:
            tree: B requests, M nodes.
            target: asked once per depth, for the current node of every request still walking.
            noise: asked under stream TOKEN at offset depth + 1, as in plain decoding.

        Returns:
            The accepted paths and the token after each of them.
        """
        children = children_table(tree)
        nodes = torch.zeros_like(tree.num_nodes)
        next_token_ids = torch.zeros_like(nodes)
        rows = torch.arange(nodes.shape[0], device=nodes.device)
        depth = 0
        while rows.numel():
            here = nodes[rows]
            drawn = _draw(target, noise, rows, here, depth)
            next_token_ids[rows] = drawn  # overwritten one depth further down if the walk goes on
            if children.shape[2] == 0:
                break
            child = _first_child_holding(tree, children, rows, here, drawn)
            found = child < tree.token_ids.shape[1]
            rows = rows[found]
            nodes[rows] = child[found]
            depth += 1
        path, num_accepted = paths_to(tree.parents, nodes)
        return VerifyResult(path, num_accepted, next_token_ids)


def _draw(target: TargetRows, noise: Noise, rows: Tensor, nodes: Tensor, depth: int) -> Tensor:
    """Return [L] int64, the target's token after each node."""
    top = target.top(rows, nodes)
    if top is not None:
        return top
    return noise.choose(target.probs(rows, nodes), NoiseKey(rows, depth + 1, Stream.TOKEN))


def _first_child_holding(tree: TokenTree, children: Tensor, rows: Tensor, nodes: Tensor, token_ids: Tensor) -> Tensor:
    """Return [L] int64, the first child with that token; M where there is none."""
    none = tree.token_ids.shape[1]
    if children.shape[2] == 0:
        return torch.full_like(rows, none)
    child = children[rows, nodes]  # [L, C]
    holds = (child >= 0) & (tree.token_ids[rows[:, None], child.clamp_min(0)] == token_ids[:, None])
    return torch.where(holds, child, none).amin(dim=1)
