"""Following a draft tree while it holds the tokens that someone chooses. No rule itself; rules share it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.interfaces import TargetRows, TokenTree, VerifyResult
from specdec.tree import children_table, paths_to

# (requests [L], their current nodes [L], depth of those) -> the token [L] after each
Choose = Callable[[Tensor, Tensor, int], Tensor]


def follow(tree: TokenTree, choose: Choose) -> VerifyResult:
    """Walk every tree of the step down from its root for as long as a child holds the chosen token.

    Args:
        tree: B requests, M nodes.
        choose: asked once per depth, for the current node of every request still walking.
    """
    children = children_table(tree)
    nodes = torch.zeros_like(tree.num_nodes)
    next_token_ids = torch.zeros_like(nodes)
    rows = torch.arange(nodes.shape[0], device=nodes.device)
    depth = 0
    while rows.numel():
        here = nodes[rows]
        chosen = choose(rows, here, depth)
        next_token_ids[rows] = chosen  # overwritten one depth further down if the walk goes on
        if children.shape[2] == 0:
            break
        child = _first_child_holding(tree, children, rows, here, chosen)
        found = child < tree.token_ids.shape[1]
        rows = rows[found]
        nodes[rows] = child[found]
        depth += 1
    path, num_accepted = paths_to(tree.parents, nodes)
    return VerifyResult(path, num_accepted, next_token_ids)


def follow_argmax(tree: TokenTree, target: TargetRows) -> VerifyResult | None:
    """Return what greedy decoding keeps, which every rule must at temperature 0; None unless all are greedy."""
    rows = torch.arange(tree.num_nodes.shape[0], device=tree.num_nodes.device)
    first = target.top(rows, torch.zeros_like(rows))
    if first is None:
        return None
    after_roots: Tensor = first

    def argmax(rows: Tensor, nodes: Tensor, depth: int) -> Tensor:
        top = after_roots if depth == 0 else target.top(rows, nodes)
        assert top is not None, "all requests are greedy"
        return top

    return follow(tree, argmax)


def _first_child_holding(tree: TokenTree, children: Tensor, rows: Tensor, nodes: Tensor, token_ids: Tensor) -> Tensor:
    """Return [L] int64, the first child with that token; M where there is none."""
    none = tree.token_ids.shape[1]
    child = children[rows, nodes]  # [L, C]
    holds = (child >= 0) & (tree.token_ids[rows[:, None], child.clamp_min(0)] == token_ids[:, None])
    return torch.where(holds, child, none).amin(dim=1)
