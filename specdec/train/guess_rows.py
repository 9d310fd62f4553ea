"""Which guess of a batch is about which token, and where the target's own choice for it stands."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.train.batches import Batch, shifted


class GuessRows:
    """Which rows are guesses about what: base row t of column block [B, R], target rows as a flat list."""

    def __init__(self, batch: Batch, columns: int) -> None:
        self._batch, self._columns = batch, columns
        size = batch.token_ids.shape[1]
        # The target's choice of a response token: the row before it, which must have features.
        chooses = torch.zeros_like(batch.is_response)
        chooses[:, :-1] = batch.is_response[:, 1:]
        self.source = chooses & batch.has_features  # [B, S]
        number = torch.full(batch.token_ids.shape, -1, dtype=torch.int64, device=batch.token_ids.device)
        number[self.source] = torch.arange(int(self.source.sum()), device=number.device)
        self._number, self._size = number, size

    def at(self, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return, for the guesses of a step, their target rows [n] and their (sequence, column in the block)."""
        # Base column s guesses the token behind column s + 1 + step.
        ahead = shifted(self._number, 1 + step, fill=-1)[:, self._size - self._columns :]
        # Drafting begins behind the first response token, so the base row is at least the last prompt row.
        begins = shifted(self._batch.is_response, 1)[:, self._size - self._columns :]
        where = ((ahead >= 0) & begins).nonzero(as_tuple=True)
        return ahead[where], (where[0], where[1])

    def token_ids(self, step: int, where: tuple[Tensor, Tensor]) -> Tensor:
        """Return the tokens [n] that came out: the text's, two places and the step behind the base."""
        block = shifted(self._batch.token_ids, 2 + step)[:, self._size - self._columns :]
        return block[where]
