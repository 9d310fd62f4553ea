"""Building and reading token trees.

Nodes at or beyond `num_nodes` are padding: builders fill them, nothing reads them. A parent always comes before its
children, so one pass in node order, or as many gathers as the tree is deep, reads everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.interfaces import DraftRequest, TokenTree

_MASS_TOLERANCE = 1e-3  # a float32 softmax over a large vocabulary stays far inside


def chain(
    root_ids: Tensor,
    draft_ids: Tensor,
    num_draft: Tensor,
    draft_probs: Tensor | None = None,
    draft_row: Tensor | None = None,
) -> TokenTree:
    """Build the tree of a chain of draft tokens per request.

    Args:
        root_ids: [B] int64, each request's last pending token.
        draft_ids: [B, K] int64; entries at or beyond `num_draft` are ignored.
        num_draft: [B] int64 in 0..K.
        draft_probs: [R, V] the distributions the draft tokens were drawn from; None = point masses.
        draft_row: [B, K + 1] int64 row of `draft_probs` the child of each node was drawn from, -1 = point mass;
            None = row b * K + j belongs to `draft_ids[b, j]`, the layout of a [B, K, V] tensor.

    Returns:
        TokenTree with M = K + 1.
    """
    batch, width = draft_ids.shape
    node = torch.arange(width + 1, device=draft_ids.device)
    if draft_probs is not None and draft_row is None:
        row = torch.arange(batch, device=draft_ids.device)[:, None] * width + node
        draft_row = torch.where(node < num_draft[:, None], row, -1)
    return TokenTree(
        token_ids=torch.cat([root_ids[:, None], draft_ids], dim=1),
        parents=(node - 1).expand(batch, -1),
        num_nodes=num_draft + 1,
        draft_probs=draft_probs,
        draft_row=draft_row,
    )


def stack_trees(
    trees: Sequence[tuple[Tensor | Sequence[int], Tensor | Sequence[int]]],
    draft_probs: Tensor | None = None,
    draft_rows: Sequence[Tensor | Sequence[int]] | None = None,
    with_replacement: bool = False,
    device: torch.device | str = "cpu",
) -> TokenTree:
    """Stack one (token_ids [m], parents [m]) pair per request, root included, of any sizes.

    Args:
        trees: token ids and parents of each request.
        draft_probs: [R, V] distributions shared by all requests.
        draft_rows: [m] rows of `draft_probs` per request, for the CHILDREN of each node.
        with_replacement: how sampled siblings were drawn.
        device: where the result lives.

    Returns:
        TokenTree with M = the largest m; padding repeats nothing: token 0, parent -1, draft row -1.
    """
    sizes = [len(token_ids) for token_ids, _ in trees]
    width = max(sizes, default=1)

    def pad(rows: Sequence[Tensor | Sequence[int]], fill: int) -> Tensor:
        out = torch.full((len(rows), width), fill, dtype=torch.int64, device=device)
        for row, values in zip(out, rows, strict=True):
            row[: len(values)] = torch.as_tensor(values, dtype=torch.int64, device=device)
        return out

    return TokenTree(
        token_ids=pad([token_ids for token_ids, _ in trees], 0),
        parents=pad([parents for _, parents in trees], -1),
        num_nodes=torch.tensor(sizes, dtype=torch.int64, device=device),
        draft_probs=draft_probs,
        draft_row=None if draft_rows is None else pad(draft_rows, -1),
        with_replacement=with_replacement,
    )


def pad_tree(tree: TokenTree, width: int) -> TokenTree:
    """Widen a tree to M = `width` nodes with padding; a tree that is wide enough already is returned as it is."""
    missing = width - tree.token_ids.shape[1]
    if missing <= 0:
        return tree

    def widen(values: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, missing), value=fill)

    draft_row = None if tree.draft_row is None else widen(tree.draft_row, -1)
    return replace(tree, token_ids=widen(tree.token_ids, 0), parents=widen(tree.parents, -1), draft_row=draft_row)


def select(tree: TokenTree, rows: Tensor | Sequence[int]) -> TokenTree:
    """Return the sub-batch of requests `rows` [L] in that order; `draft_probs` is shared, not copied."""
    rows = torch.as_tensor(rows, dtype=torch.int64, device=tree.token_ids.device)
    return replace(
        tree,
        token_ids=tree.token_ids[rows],
        parents=tree.parents[rows],
        num_nodes=tree.num_nodes[rows],
        draft_row=None if tree.draft_row is None else tree.draft_row[rows],
    )


def move(tree: TokenTree, device: torch.device) -> TokenTree:
    """Return the tree with all its tensors on `device`."""
    return replace(
        tree,
        token_ids=tree.token_ids.to(device),
        parents=tree.parents.to(device),
        num_nodes=tree.num_nodes.to(device),
        draft_probs=None if tree.draft_probs is None else tree.draft_probs.to(device),
        draft_row=None if tree.draft_row is None else tree.draft_row.to(device),
    )


def drop_drafts(tree: TokenTree, bad_rows: Tensor | Sequence[int]) -> TokenTree:
    """Return the tree with nothing drafted for requests `bad_rows` [L] (indices); the roots stay."""
    bad_rows = torch.as_tensor(bad_rows, dtype=torch.int64, device=tree.token_ids.device)
    return replace(tree, num_nodes=tree.num_nodes.index_fill(0, bad_rows, 1))


def is_chain(parents: Tensor) -> bool:
    """Whether `parents` [..., m] is -1, 0, 1, ... in every row; pass the nodes of one request, without padding."""
    return bool((parents == torch.arange(-1, parents.shape[-1] - 1, device=parents.device)).all())


def depths(parents: Tensor) -> Tensor:
    """Return the number of edges above each node, int64 of the shape of `parents` [..., m]; a root has 0."""
    depth = torch.zeros_like(parents)
    above = parents
    while bool((above >= 0).any()):
        depth += above >= 0
        above = _parent_of(parents, above)
    return depth


def ancestor_mask(parents: Tensor) -> Tensor:
    """Return which nodes each node may see: itself and its ancestors.

    For the tree 0 -> (1 -> 3, 2), that is parents -1, 0, 0, 1, row i is what node i sees::

             0 1 2 3
        0    1 0 0 0
        1    1 1 0 0
        2    1 0 1 0
        3    1 1 0 1

    Args:
        parents: [m] int64.

    Returns:
        [m, m] bool.
    """
    size = parents.shape[0]
    mask = torch.eye(size, dtype=torch.bool, device=parents.device)
    if is_chain(parents):
        return torch.ones_like(mask).tril()
    node = torch.arange(size, device=parents.device)
    above = parents
    while bool((above >= 0).any()):
        # A node whose ancestors are used up marks itself again, which changes nothing.
        mask[node, torch.where(above >= 0, above, node)] = True
        above = _parent_of(parents, above)
    return mask


def children_table(tree: TokenTree) -> Tensor:
    """Return [B, M, C] int64: the children of each node in drawn order, -1 padded; C = most children of a node."""
    batch, width = tree.parents.shape
    device = tree.parents.device
    if width == 1:  # plain decoding: nothing was drafted
        return torch.empty(batch, 1, 0, dtype=torch.int64, device=device)
    node = torch.arange(width, device=device)
    is_child = (node > 0) & (node < tree.num_nodes[:, None])
    siblings_before = (tree.parents[:, :, None] == tree.parents[:, None, :]) & is_child[:, None, :]
    ordinal = siblings_before.tril(-1).sum(dim=-1)
    request, child = is_child.nonzero(as_tuple=True)
    ordinal = ordinal[request, child]
    most = int(ordinal.amax()) + 1 if child.numel() else 0
    table = torch.full((batch, width, most), -1, dtype=torch.int64, device=device)
    table[request, tree.parents[request, child], ordinal] = child
    return table


def path_to(parents: Tensor, node: int) -> Tensor:
    """Return [depth] int64: the nodes from below the root down to `node`; `parents` is [m]. The root's is empty."""
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = int(parents[node])
    return torch.tensor(path[::-1], dtype=torch.int64, device=parents.device)


def paths_to(parents: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root path of one node per request.

    Args:
        parents: [B, M] int64.
        nodes: [B] int64.

    Returns:
        path [B, D] int64 from below the root, -1 padded, D = the largest depth; depth [B] int64.
    """
    upward: list[Tensor] = []
    here = nodes[:, None]
    while bool((here > 0).any()):
        upward.append(torch.where(here > 0, here, -1))
        here = _parent_of(parents, here)
    if not upward:
        return nodes.new_empty(nodes.shape[0], 0), torch.zeros_like(nodes)
    steps = torch.cat(upward, dim=1)
    depth = (steps >= 0).sum(dim=1)
    # Column j is the (depth - 1 - j)-th step upward.
    order = depth[:, None] - 1 - torch.arange(steps.shape[1], device=nodes.device)
    return torch.where(order >= 0, steps.gather(1, order.clamp_min(0)), -1), depth


def _parent_of(parents: Tensor, nodes: Tensor) -> Tensor:
    """Return the parents of `nodes` (same leading shape), -1 for -1."""
    return torch.where(nodes >= 0, parents.gather(-1, nodes.clamp_min(0)), -1)


def check_tree(tree: TokenTree, requests: Sequence[DraftRequest], vocab_size: int) -> list[str | None]:
    """Return per request why its tree cannot be verified, or None; never raises on a tree's content.

    Args:
        tree: what a drafter proposed.
        requests: what it was asked, one per row.
        vocab_size: V of the target.
    """
    shape_fault = _shape_fault(tree, len(requests), vocab_size)
    if shape_fault is not None:
        return [shape_fault] * len(requests)
    faults = _node_faults(tree, requests, vocab_size)
    if tree.draft_probs is not None and tree.draft_row is not None:
        faults += _draft_prob_faults(tree, tree.draft_probs, tree.draft_row)
    reasons: list[str | None] = [None] * len(requests)
    if not faults:
        return reasons
    found = torch.stack([rows for _, rows in faults]).tolist()
    for (reason, _), rows in zip(reversed(faults), reversed(found), strict=True):  # the first fault listed wins
        for row, is_bad in enumerate(rows):
            if is_bad:
                reasons[row] = reason
    return reasons


def _shape_fault(tree: Any, batch: int, vocab_size: int) -> str | None:
    """Return what is wrong with the types, shapes and dtypes of a tree, which spoils it for every request."""
    if not isinstance(tree, TokenTree):
        return f"it is {type(tree).__name__}, not a TokenTree"
    shape = tuple(tree.token_ids.shape)
    if len(shape) != 2 or shape[0] != batch or shape[1] < 1:
        return f"token_ids has shape {shape}, expected [{batch}, M] with M >= 1"
    indices = {
        "token_ids": (tree.token_ids, shape),
        "parents": (tree.parents, shape),
        "num_nodes": (tree.num_nodes, (batch,)),
    }
    if tree.draft_row is not None:
        indices["draft_row"] = (tree.draft_row, shape)
    for name, (values, allowed) in indices.items():
        if tuple(values.shape) != allowed:
            return f"{name} has shape {tuple(values.shape)}, expected {list(allowed)}"
        if values.dtype != torch.int64:
            return f"{name} has dtype {values.dtype}, expected torch.int64"
    return _draft_probs_shape_fault(tree, vocab_size)


def _draft_probs_shape_fault(tree: TokenTree, vocab_size: int) -> str | None:
    if (tree.draft_probs is None) != (tree.draft_row is None):
        return "draft_probs and draft_row are given only together"
    if tree.draft_probs is None:
        return None
    if tree.draft_probs.dim() != 2 or tree.draft_probs.shape[1] != vocab_size:
        return f"draft_probs has shape {tuple(tree.draft_probs.shape)}, expected [R, {vocab_size}]"
    if not tree.draft_probs.is_floating_point():
        return f"draft_probs has dtype {tree.draft_probs.dtype}, expected a floating-point one"
    return None


def _node_faults(tree: TokenTree, requests: Sequence[DraftRequest], vocab_size: int) -> list[tuple[str, Tensor]]:
    """Return (reason, [B] bool) pairs about ids, structure and size."""
    device = tree.token_ids.device
    asked = torch.tensor([[r.root_token_id, r.max_draft_tokens] for r in requests], dtype=torch.int64, device=device)
    root_ids, limits = asked.reshape(-1, 2).unbind(dim=1)
    node = torch.arange(tree.token_ids.shape[1], device=device)
    used = node < tree.num_nodes[:, None]
    drafted = used & (node > 0)
    bad_id = (tree.token_ids < 0) | (tree.token_ids >= vocab_size)
    bad_parent = (tree.parents < 0) | (tree.parents >= node)
    return [
        ("num_nodes is outside 1..M", (tree.num_nodes < 1) | (tree.num_nodes > node.shape[0])),
        ("the root is not the request's last pending token", tree.token_ids[:, 0] != root_ids),
        ("the root has a parent", tree.parents[:, 0] != -1),
        ("more draft tokens than max_draft_tokens", tree.num_nodes - 1 > limits),
        ("a draft token id is outside the target's vocabulary", (bad_id & drafted).any(dim=1)),
        ("a parent does not come before its child", (bad_parent & drafted).any(dim=1)),
    ]


def _draft_prob_faults(tree: TokenTree, draft_probs: Tensor, draft_row: Tensor) -> list[tuple[str, Tensor]]:
    """Return (reason, [B] bool) pairs about the distributions the draft tokens were drawn from."""
    num_rows = draft_probs.shape[0]
    node = torch.arange(draft_row.shape[1], device=draft_row.device)
    drafted = (node > 0) & (node < tree.num_nodes[:, None])
    parents = tree.parents.clamp(0, draft_row.shape[1] - 1)
    row = draft_row.gather(1, parents)  # [B, M]: the row each node itself was drawn from
    out_of_range = ("draft_row is outside draft_probs", (drafted & ((row < -1) | (row >= num_rows))).any(dim=1))
    if num_rows == 0:
        return [out_of_range]
    sampled = drafted & (row >= 0) & (row < num_rows)
    row = row.clamp(0, num_rows - 1)
    # Written so that NaN fails: every comparison with it is False.
    good_rows = (draft_probs.amin(dim=1) >= 0) & (
        (draft_probs.sum(dim=1, dtype=torch.float64) - 1.0).abs() <= _MASS_TOLERANCE
    )
    tokens = tree.token_ids.clamp(0, draft_probs.shape[1] - 1)
    never_drawn = ~(draft_probs[row, tokens] > 0)
    return [
        out_of_range,
        ("draft_probs has NaN, a negative entry or a sum other than 1", (sampled & ~good_rows[row]).any(dim=1)),
        ("a draft token has probability 0 in the row it was drawn from", (sampled & never_drawn).any(dim=1)),
    ]
