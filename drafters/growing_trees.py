"""Trees of a whole batch while a drafter's model grows them. Shared by ways to grow trees; drafts nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.interfaces import DraftRequest, TokenTree

# Runs new tokens of some requests through the drafter's model. It is given the indices of those requests; per request
# the tokens [f] int64; and per token the row of its parent [f] int64, where a request's rows count all its tokens run
# in this growth, in the order they were run: the root is row 0 and its own parent -1. It returns what the model says
# comes next, per request or as one tensor in the same order: [f, Vd] logits, or log-probabilities, which are logits.
Expand = Callable[[list[int], list[Tensor], list[Tensor]], Sequence[Tensor] | Tensor]


class Grown(NamedTuple):
    """Trees, and per request the row in which each node was run (see `Expand`), -1 for nodes that were not."""

    tree: TokenTree
    rows: list[list[int]]


class GrowingTrees:
    """The nodes of B trees as CPU tables [B, N] int64: column 0 is the root, a column without a node has token -1.

    A parent's column lies before its children's; `rows` are what `Expand` counts.
    """

    def __init__(self, requests: Sequence[DraftRequest], num_columns: int, expand: Expand) -> None:
        self.token_ids = torch.full((len(requests), num_columns), -1, dtype=torch.int64)
        self.token_ids[:, 0] = torch.tensor([r.root_token_id for r in requests], dtype=torch.int64)
        self.parents, self.rows = torch.full_like(self.token_ids, -1), torch.full_like(self.token_ids, -1)
        self._num_run = torch.zeros(len(requests), dtype=torch.int64)
        self._expand = expand

    def run(self, columns: Tensor, wanted: Tensor) -> Tensor:
        """Run nodes through the model.

        Args:
            columns: [B, F] int64 of nodes.
            wanted: [B, F] bool, which of them, at least one; the parents of all were run before.

        Returns:
            [R, Vd] logits after each wanted node, in the order of `wanted.nonzero()`.
        """
        request, place = wanted.nonzero(as_tuple=True)
        column = columns[request, place]
        counts = wanted.sum(dim=1)
        self.rows[request, column] = (self._num_run[:, None] + wanted.cumsum(dim=1) - 1)[request, place]
        self._num_run += counts
        above = self.parents[request, column]
        above = torch.where(above >= 0, self.rows[request, above.clamp_min(0)], -1)
        running = counts.nonzero()[:, 0]
        sizes = counts[running].tolist()
        token_ids = self.token_ids[request, column]
        found = self._expand(running.tolist(), list(token_ids.split(sizes)), list(above.split(sizes)))
        logits = found if isinstance(found, Tensor) else found[0] if len(found) == 1 else torch.cat(list(found))
        assert logits.shape[0] == column.shape[0], (
            f"{column.shape[0]} tokens were run, {logits.shape[0]} rows came back"
        )
        return logits

    def keep(self, kept: Tensor, draft_row: Tensor | None = None, draft_probs: Tensor | None = None) -> Grown:
        """Return the trees of the nodes `kept` [B, N] bool, roots and all ancestors included, in column order.

        Args:
            kept: which columns stay.
            draft_row: [B, N] int64 row of `draft_probs` the children of each node were drawn from.
            draft_probs: [R, V].
        """
        request, column = kept.nonzero(as_tuple=True)
        number = kept.cumsum(dim=1) - 1
        num_nodes = kept.sum(dim=1)

        def compact(values: Tensor, fill: int) -> Tensor:
            out = torch.full((kept.shape[0], int(num_nodes.max())), fill, dtype=torch.int64)
            out[request, number[request, column]] = values[request, column]
            return out

        above = torch.where(self.parents >= 0, number.gather(1, self.parents.clamp_min(0)), -1)
        tree = TokenTree(
            token_ids=compact(self.token_ids, 0),
            parents=compact(above, -1),
            num_nodes=num_nodes,
            draft_probs=draft_probs,
            draft_row=None if draft_row is None else compact(draft_row, -1),
        )
        rows = [row[:n] for row, n in zip(compact(self.rows, -1).tolist(), num_nodes.tolist(), strict=True)]
        return Grown(tree, rows)


def likeliest(logits: Tensor, width: int, vocab_size: int, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each row, best first, on the CPU.

    Args:
        logits: [R, Vd]; columns beyond the vocabulary are padding of the head.
        width: how many; as many as there are if there are fewer.
        vocab_size: V of the target.
        draft_ids: [Vd] int64, the target's id of each draft id; None = they are the same.

    Returns:
        log-probabilities [R, width] float64 <= 0, -inf for what cannot be drafted; token ids [R, width] int64.
    """
    logits = logits[:, : vocab_size if draft_ids is None else draft_ids.shape[0]].to(torch.float32)
    if width == 1:  # of equal logits a chain takes the first one; topk does not say which it takes
        values, ids = logits.max(dim=-1, keepdim=True)
    else:
        values, ids = logits.topk(min(width, logits.shape[1]), dim=-1)
    # Rounding must not make a child likelier than its parent; what NaN says is never drafted.
    values = (
        (values - logits.logsumexp(dim=-1, keepdim=True)).clamp_max(0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    )
    ids = ids if draft_ids is None else draft_ids.to(ids.device)[ids]
    return values.to(torch.float64).cpu(), ids.cpu()
