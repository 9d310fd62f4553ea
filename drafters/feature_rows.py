"""What a head is fed with: the target's hidden states, each with the token behind it. Shared; drafts nothing itself.

Row t of a request is the hidden state of position t together with the token at t + 1, so a text of n tokens has rows
0 .. n - 2, and what the head makes of the last one speaks of the token at n.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.interfaces import Observation


class _Waiting(NamedTuple):
    """Hidden states of rows `begin` .. `end` - 1, oldest first. One object, so that no interrupt leaves half of it."""

    begin: int
    end: int
    parts: tuple[Tensor, ...]  # [n, F] each


class FeatureRows:
    """One request's rows without a gap, from `first` to the newest, of which those not run yet are kept.

    How many were run is the caller's to know: its KV cache says so.

    Hidden states are the target's own and cannot be had again: after a failed step the tokens are told anew without
    them. The rows then begin where hidden states are heard again, and the head sees that much less of the text.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []  # from position 0 on
        self.first = 0
        self._waiting = _Waiting(0, 0, ())

    @property
    def end(self) -> int:
        """The number of the row that comes next."""
        return self._waiting.end

    def observe(self, seen: Observation) -> bool:
        """Take in tokens and hidden states; what is heard again changes nothing.

        Returns:
            False if the rows begin anew: those run before are no part of them.
        """
        known = len(self.token_ids)
        assert seen.start <= known, f"request {seen.request_id}: tokens from {seen.start} on, but {known} are known"
        ids = seen.token_ids.tolist()
        old = self.token_ids[seen.start :]
        num_same = next((i for i, (a, b) in enumerate(zip(old, ids, strict=False)) if a != b), min(len(old), len(ids)))
        self.token_ids[seen.start :] = ids
        goes_on = self.end < seen.start + num_same  # every row's token is still the same
        if not goes_on:
            self.begin_at(0)
        if seen.features is None:
            return goes_on
        end = len(self.token_ids) - 1
        begin = end - seen.features.shape[0]
        if begin > self.end:  # hidden states are missing in between
            goes_on = False
            self.begin_at(begin)
        if end > self.end:
            new = seen.features[self.end - begin :].clone()  # the caller's may be a view of all rows of a forward
            self._waiting = _Waiting(self._waiting.begin, end, (*self._waiting.parts, new))
        return goes_on

    def take(self, done: int, most: int) -> tuple[Tensor, Tensor]:
        """Return hidden states [n, F] and tokens [n] int64 of the rows from `done` on, at most `most` of them."""
        begin, _, parts = self._waiting
        features = (parts[0] if len(parts) == 1 else torch.cat(parts))[done - begin :][:most]
        return features, torch.tensor(self.token_ids[done + 1 : done + 1 + features.shape[0]], dtype=torch.int64)

    def drop(self, done: int) -> None:
        """Drop the hidden states of the rows before `done`."""
        begin, end, parts = self._waiting
        left = parts if done == begin else (torch.cat(parts)[done - begin :].clone(),) if done < end else ()
        self._waiting = _Waiting(done, end, left)

    def begin_at(self, first: int) -> None:
        """Drop all rows; the next one is `first`. Tokens stay."""
        self.first, self._waiting = first, _Waiting(first, first, ())
