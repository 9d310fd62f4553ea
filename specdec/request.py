"""One request: its tokens, how far its KV reaches, and when it stops. Knows no tensors' devices and no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.interfaces import SamplingParams
from specdec.stats import RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a request ends. `max_total_tokens` is prompt + new tokens: the caller's or the model's limit."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a failed step must give back."""

    num_tokens: int
    num_computed: int
    finish_reason: str | None
    stats: RequestStats  # shares the list of emissions
    num_emissions: int


@dataclass(slots=True)
class Request:
    """`tokens[:num_computed]` have KV; the rest is pending, and the last pending token is node 0 of a draft tree."""

    request_id: int
    tokens: list[int]
    sampling: SamplingParams
    stop: StopRules
    seed: int
    num_computed: int = 0
    finish_reason: str | None = None  # "stop" after an EOS token, "length" at a limit, "abort"
    stats: RequestStats = field(default_factory=RequestStats)
    num_prompt_tokens: int = 0
    num_reported: int = 0  # new tokens already handed out by Engine.step
    num_accepted_reported: int = 0  # how many of those were drafted
    finish_reported: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.stats.num_prompt_tokens = len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_remaining(self) -> int:
        """How many more tokens may be emitted."""
        remaining = self.stop.max_new_tokens - (len(self.tokens) - self.num_prompt_tokens)
        if self.stop.max_total_tokens is not None:
            remaining = min(remaining, self.stop.max_total_tokens - len(self.tokens))
        return remaining

    def crop(self, candidates: Sequence[int]) -> tuple[list[int], str | None]:
        """Return what of a step's tokens is emitted, up to the first stop, and the reason if one was met.

        The stop token itself is emitted, as transformers' generate() does.
        """
        kept: list[int] = []
        for token in candidates[: self.num_remaining]:
            kept.append(token)
            if token in self.stop.eos_token_ids:
                return kept, "stop"
        return kept, "length" if len(kept) == self.num_remaining else None

    @property
    def has_news(self) -> bool:
        """True while tokens or the end of the request have not been handed out."""
        has_tokens = len(self.tokens) > self.num_prompt_tokens + self.num_reported
        return has_tokens or (self.finish_reason is not None and not self.finish_reported)

    def hand_out(self) -> RequestOutput:
        """Return what has not been handed out yet, once."""
        new = self.tokens[self.num_prompt_tokens + self.num_reported :]
        accepted = self.stats.num_accepted_tokens - self.num_accepted_reported
        self.num_reported += len(new)
        self.num_accepted_reported += accepted
        self.finish_reported = self.finish_reason is not None
        return RequestOutput(self.request_id, new, accepted, self.finish_reason)

    def snapshot(self) -> Snapshot:
        """Return what `restore` needs."""
        emissions = len(self.stats.emissions)
        return Snapshot(len(self.tokens), self.num_computed, self.finish_reason, self.stats.copy(), emissions)

    def restore(self, saved: Snapshot) -> None:
        """Undo everything since `saved`."""
        del self.tokens[saved.num_tokens :]
        self.num_computed, self.finish_reason, self.stats = saved.num_computed, saved.finish_reason, saved.stats
        del self.stats.emissions[saved.num_emissions :]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step gave one request."""

    request_id: int
    token_ids: list[int]  # newly emitted
    num_accepted: int  # how many of them were drafted
    finish_reason: str | None
