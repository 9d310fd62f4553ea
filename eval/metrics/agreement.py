"""How far answers are those of a reference: whole, and up to where they part."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.debug.near_tie import first_difference
from specdec.eval.metrics.columns import check_equal_lengths, share_with_interval, until_eos

Answers = Sequence[Sequence[int]]  # token ids


@dataclass(frozen=True, slots=True)
class Agreement:
    """One pair of answers."""

    parted_at: int | None  # first token at which they differ, one ending before the other included; None: equal
    longer: int  # tokens of the longer answer

    @property
    def leading(self) -> int:
        """Return how many tokens they have in common from the start."""
        return self.longer if self.parted_at is None else self.parted_at


def agreements(
    predictions: Answers, references: Answers, eos_token_id: int | Sequence[int] | None = None
) -> list[Agreement]:
    """Return one comparison per pair of answers.

    Args:
        predictions: token ids of the answers.
        references: of those they should be.
        eos_token_id: ends an answer; what comes behind it does not count.

    Raises:
        InputError: there are not as many of both.
    """
    check_equal_lengths({"predictions": predictions, "references": references})
    found = []
    for prediction, reference in zip(predictions, references, strict=True):
        got, expected = until_eos(prediction, eos_token_id), until_eos(reference, eos_token_id)
        position = first_difference(expected, got)
        if position is None and len(got) != len(expected):
            position = min(len(got), len(expected))
        found.append(Agreement(position, max(len(got), len(expected))))
    return found


def exact_match_rate(found: Sequence[Agreement], level: float) -> dict[str, Any]:
    """Return the share of answers that are equal, with its interval; see `share_with_interval`."""
    return share_with_interval("exact_match_rate", sum(a.parted_at is None for a in found), len(found), level)


def leading_share(found: Sequence[Agreement]) -> float | None:
    """Return the tokens before the first difference over those of the longer answers (micro); None without tokens."""
    longer = sum(a.longer for a in found)
    return sum(a.leading for a in found) / longer if longer else None


def median_divergence(found: Sequence[Agreement]) -> float | None:
    """Return the median first difference of the answers that part; None if none does."""
    parted = [a.parted_at for a in found if a.parted_at is not None]
    return statistics.median(parted) if parted else None
