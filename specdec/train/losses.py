"""What a training step of any head reports, and the acceptance length that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A loss, and which guesses were the text's next token."""

    loss: Tensor  # scalar, per row of the first draft position
    hits: Tensor  # [K, B, R] int8: draft position k of base column r: 1 right, 0 wrong, -1 not asked


def accuracy(hits: Tensor) -> list[float]:
    """Return the share of right guesses per draft position, over all base columns; hits: [K, B, R] int8."""
    asked = (hits >= 0).sum(dim=(1, 2)).clamp_min(1)
    return [round(float(a), 5) for a in (hits == 1).sum(dim=(1, 2)) / asked]


def walk(hits: Sequence[Tensor]) -> tuple[int, int]:
    """Return (tokens emitted, target forwards) of greedy decoding with chains of K drafts over recorded texts.

    Under greedy decoding a chain's first wrong draft ends what is accepted, and all drafts before it are the text's
    own tokens: so which drafts would be accepted at each place can be read off the text without decoding. The walk
    accepts the run of hits at its place and goes on one token behind it.

    Args:
        hits: per batch [K, B, R] int8 as in `StepLoss`, of texts decoded greedily.
    """
    emitted = forwards = 0
    for grid in hits:
        asked = grid[0] >= 0
        runs = (grid == 1).to(torch.int64).cumprod(dim=0).sum(dim=0)
        for row in range(grid.shape[1]):
            places = asked[row].nonzero()[:, 0].tolist()
            lengths = runs[row].tolist()
            place, end = (places[0], places[-1]) if places else (0, -1)
            while place <= end:
                # A draft that reaches behind the text's end counts as far as the text goes.
                taken = min(lengths[place] + 1, end + 1 - place)
                emitted, forwards = emitted + taken, forwards + 1
                place += lengths[place] + 1
    return emitted, forwards
