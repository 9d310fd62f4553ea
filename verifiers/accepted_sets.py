"""The longest draft path whose tokens all lie in sets the target makes up. No rule itself; the lossy rules share it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.interfaces import Noise, NoiseKey, Stream, TargetRows, TokenTree, VerifyResult
from specdec.tree import children_table, paths_to
from specdec.verifiers.walk import follow_argmax

# (target distributions [L, V], tokens [L, C]) -> [L, C] bool; never a token of probability 0
Accepts = Callable[[Tensor, Tensor], Tensor]


def longest_accepted(tree: TokenTree, target: TargetRows, noise: Noise, accepts: Accepts) -> VerifyResult:
    """Keep the longest path of accepted tokens; of equally long ones the one the target finds likeliest.

    Args:
        tree: B requests, M nodes; what its tokens were drawn from does not matter.
        target: asked for every accepted node, on paths that are not kept too.
        noise: asked for the token after the path only, under TOKEN at its own position.
        accepts: the rule. Greedy requests follow the argmax instead, without loss.
    """
    greedy = follow_argmax(tree, target)
    if greedy is not None:
        return greedy
    children = children_table(tree)
    everyone = torch.arange(tree.num_nodes.shape[0], device=tree.num_nodes.device)
    best = torch.zeros_like(everyone)
    rows, nodes = everyone, best  # the accepted nodes of one depth; a request may have several
    scores = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)  # log probabilities of their paths
    while rows.numel() and children.shape[2]:
        inner = children[rows, nodes, 0] >= 0
        rows, nodes, scores = rows[inner], nodes[inner], scores[inner]
        if not rows.numel():
            break
        probs, siblings = target.probs(rows, nodes), children[rows, nodes]
        tokens = tree.token_ids[rows[:, None], siblings.clamp_min(0)]
        accepted = (siblings >= 0) & accepts(probs, tokens)
        scores = (scores[:, None] + probs.gather(1, tokens).to(torch.float64).log())[accepted]
        rows, nodes = rows[:, None].expand_as(siblings)[accepted], siblings[accepted]
        best = _likeliest(best, rows, nodes, scores, tree.token_ids.shape[1])
    path, num_accepted = paths_to(tree.parents, best)
    key = NoiseKey(everyone, num_accepted + 1, Stream.TOKEN)
    return VerifyResult(path, num_accepted, noise.choose(target.probs(everyone, best), key))


def _likeliest(best: Tensor, rows: Tensor, nodes: Tensor, scores: Tensor, width: int) -> Tensor:
    """Return `best` [B] with the highest-scoring node [n] of each request in `rows` [n]; the first of equal ones."""
    highest = scores.new_full(best.shape, -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    is_highest = scores == highest[rows]
    first = torch.full_like(best, width).scatter_reduce_(0, rows[is_highest], nodes[is_highest], "amin")
    return torch.where(first < width, first, best)
