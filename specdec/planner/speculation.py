"""Whether drafting pays: tokens per step against what the step costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MOST_DRAFT_TOKENS = 16
MOST_BATCH = 4096  # that is looked at
_EVERY_BATCH_TO = 128  # beyond, every 32nd part more

Seconds = Callable[[int, int], float]  # (batch, draft tokens) -> seconds


def tokens_per_step(acceptance: float, num_draft_tokens: int) -> float:
    """Return the expected tokens of a step that drafts a chain, the target's own next token included.

    Each draft token is taken to be accepted with the same probability, given that those before it were:
    1 + a + a^2 + ... + a^K = (1 - a^(K+1)) / (1 - a).

    Source: Leviathan et al. 2023, arXiv 2211.17192, equation 1.
    """
    if acceptance == 1:
        return float(num_draft_tokens + 1)
    return (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)


@dataclass(frozen=True, slots=True)
class Choice:
    """One draft length at one batch size."""

    num_draft_tokens: int
    tokens_per_step: float
    verify_s: float
    draft_s: float
    speedup: float  # over the same engine without drafting, decode only

    @property
    def step_s(self) -> float:
        return self.verify_s + self.draft_s

    @property
    def tpot_s(self) -> float:
        return self.step_s / self.tokens_per_step

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "tokens_per_step": self.tokens_per_step,
            "verify_s": self.verify_s,
            "draft_s": self.draft_s,
            "step_s": self.step_s,
            "tpot_s": self.tpot_s,
            "speedup": self.speedup,
        }


@dataclass(frozen=True, slots=True)
class Speculation:
    """A drafter's economics. `verify` and `draft` give seconds by batch size and draft length.

    Args:
        acceptance: probability that a draft token is accepted, given that those before it were.
        verify: of the target's forward.
        draft: of drafting; not asked about no tokens.
        most: draft tokens that the drafter can give.
    """

    acceptance: float
    verify: Seconds
    draft: Seconds
    most: int = MOST_DRAFT_TOKENS

    def at(self, batch: int, num_draft_tokens: int, acceptance: float | None = None) -> Choice:
        rate = self.acceptance if acceptance is None else acceptance
        tokens = tokens_per_step(rate, num_draft_tokens)
        verify = self.verify(batch, num_draft_tokens)
        draft = self.draft(batch, num_draft_tokens) if num_draft_tokens else 0.0
        return Choice(num_draft_tokens, tokens, verify, draft, tokens * self.verify(batch, 0) / (verify + draft))

    def curve(self, batch: int) -> list[Choice]:
        """Return every draft length from none to the most."""
        return [self.at(batch, k) for k in range(self.most + 1)]

    def best(self, batch: int, acceptance: float | None = None) -> Choice:
        """Return the draft length with the most tokens per second; of equals the shortest."""
        return max(
            (self.at(batch, k, acceptance) for k in range(self.most + 1)),
            key=lambda c: (c.speedup, -c.num_draft_tokens),
        )

    def pays(self, batch: int, acceptance: float | None = None) -> bool:
        """Tell whether some draft length gives more tokens per second than none."""
        return any(self.at(batch, k, acceptance).speedup > 1 for k in range(1, self.most + 1))

    def break_even(self, batch: int) -> float | None:
        """Return the acceptance from which on some draft length pays, or None if not even 1 is enough."""
        if not self.pays(batch, 1.0):
            return None
        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if self.pays(batch, middle) else (middle, high)
        return high

    def paying_batches(self, most: int = MOST_BATCH, also: Iterable[int] = ()) -> list[tuple[int, int]]:
        """Return the ranges of batch sizes from 1 to `most` at which drafting pays, ends included.

        There may be several: experts, and work that is bound by memory at one size and by arithmetic at another. Every
        size up to 128 is looked at and every 32nd part more beyond, and between neighbours that differ the edge is
        found by halving; a range that lies between two neighbours is not seen.

        Args:
            most: the largest size looked at, no more than 4,096.
            also: sizes to look at besides.
        """
        sizes = _grid(min(most, MOST_BATCH), also)
        ranges: list[tuple[int, int]] = []
        last, last_pays = 0, False
        for size in sizes:
            pays = self.pays(size)
            if pays and not last_pays:
                ranges.append((self._edge(last, size, wanted=True), size))
            elif last_pays:
                ranges[-1] = (ranges[-1][0], size if pays else self._edge(last, size, wanted=False) - 1)
            last, last_pays = size, pays
        return ranges

    def _edge(self, low: int, high: int, wanted: bool) -> int:
        """Return the smallest size above `low` for which it pays or, if not `wanted`, does not; `high` is such."""
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.pays(middle) == wanted else (middle, high)
        return high


def _grid(most: int, also: Iterable[int]) -> list[int]:
    sizes = set(range(1, min(most, _EVERY_BATCH_TO) + 1)) | {size for size in also if size <= most}
    size = _EVERY_BATCH_TO
    while size < most:
        sizes.add(size)
        size += size // 32
    return sorted(sizes | {most})
