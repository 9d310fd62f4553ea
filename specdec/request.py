"""One request: its tokens, how far its KV reaches, and when it stops. Knows no tensors' devices and no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from specdec.interfaces import SamplingParams
from specdec.record import Keep, TokenRecord
from specdec.stats import RequestStats

# Called with all tokens of a request, prompt included, after each new one; true, or the reason, ends the request.
StopCriterion = Callable[[Sequence[int]], bool | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a request ends. `max_total_tokens` is prompt + new tokens: the caller's or the model's limit.

    `criteria` are asked about every emitted token once, in order, as plain decoding asks them, whatever was drafted.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int | None = None
    criteria: tuple[StopCriterion, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a failed step must give back."""

    num_tokens: int
    num_computed: int
    finish_reason: str | None
    stats: RequestStats  # shares the list of emissions
    num_emissions: int
    num_records: int


@dataclass(slots=True, eq=False)  # two requests are never the same one, and comparing their tokens takes long
class Request:
    """`tokens[:num_computed]` have KV; the rest is pending, and the last pending token is node 0 of a draft tree."""

    request_id: int
    tokens: list[int]
    sampling: SamplingParams
    stop: StopRules
    seed: int
    num_computed: int = 0
    finish_reason: str | None = None  # "stop" after an EOS token or a criterion, "length" at a limit, "abort", "error"
    error: BaseException | None = None  # what one of its own processors or criteria raised
    stats: RequestStats = field(default_factory=RequestStats)
    keep: Keep = field(default_factory=Keep)
    priority: int = 0  # higher runs earlier; see specdec/scheduler.py
    draft: bool = True  # False: nothing is drafted for it, by its own wish or because the drafter failed
    rank: int = 0  # set by the scheduler; the smallest runs first
    from_draft: list[bool] = field(default_factory=list)  # per new token: drafted and accepted, or the target's own
    records: list[TokenRecord] = field(default_factory=list)  # per new token, if anything is to be kept
    num_prompt_tokens: int = 0
    num_reported: int = 0  # new tokens already handed out by Engine.step
    finish_reported: bool = False
    _judged: list[tuple[int, str | None]] = field(default_factory=list)  # tokens of a step, and what ends at them
    _judged_behind: int = 0  # how many tokens there were before them

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.stats.num_prompt_tokens = len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_remaining(self) -> int:
        """How many more tokens may be emitted."""
        remaining = self.stop.max_new_tokens - self.num_new_tokens
        if self.stop.max_total_tokens is not None:
            remaining = min(remaining, self.stop.max_total_tokens - len(self.tokens))
        return remaining

    def first_stop(self, block: Sequence[int]) -> tuple[int, str] | None:
        """Return how many tokens of `block` are emitted and why it ends there, or None if nothing ends the request.

        Asks the criteria about each token once, however often the same block is put, also by a step that is run again,
        so that one with a memory sees what plain decoding shows it.
        """
        if self._judged_behind != len(self.tokens):
            self._judged_behind = len(self.tokens)
            self._judged.clear()
        for i, token in enumerate(block):
            if i == len(self._judged) or self._judged[i][0] != token:
                del self._judged[i:]
                self._judged.append((token, self._reason(block[: i + 1])))
            reason = self._judged[i][1]
            if reason is not None:
                return i + 1, reason
        return None

    def _reason(self, block: Sequence[int]) -> str | None:
        tokens = [*self.tokens, *block] if self.stop.criteria else []
        with self.blamed():
            answers = [criterion(tokens) for criterion in self.stop.criteria]  # all of them, as transformers does
        if block[-1] in self.stop.eos_token_ids:
            return "stop"
        met = next((answer for answer in answers if answer), None)
        return met if isinstance(met, str) else "stop" if met else None

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Note on what is raised inside that it is this request's own doing, not its neighbours'."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # libraries of other languages raise kinds of their own
            error.specdec_request_id = self.request_id  # type: ignore[attr-defined]
            raise

    def crop(self, candidates: Sequence[int]) -> tuple[list[int], str | None]:
        """Return what of a step's tokens is emitted, up to the first stop, and the reason if one was met.

        The token that completes a stop is itself emitted, as transformers' generate() does.
        """
        block = candidates[: self.num_remaining]
        stop = self.first_stop(block)
        if stop is not None:
            return list(block[: stop[0]]), stop[1]
        return list(block), "length" if len(block) == self.num_remaining else None

    def take(self, tokens: Sequence[int], num_accepted: int, finish_reason: str | None) -> None:
        """Append a step's emitted tokens, the first `num_accepted` of which were drafted."""
        self.tokens.extend(tokens)
        self.from_draft.extend(i < num_accepted for i in range(len(tokens)))
        self.finish_reason = finish_reason

    @property
    def has_news(self) -> bool:
        """True while tokens or the end of the request have not been handed out."""
        return self.num_new_tokens > self.num_reported or (self.finish_reason is not None and not self.finish_reported)

    def hand_out(self) -> RequestOutput:
        """Return what has not been handed out yet, once."""
        first = self.num_reported
        new, from_draft = self.tokens[self.num_prompt_tokens + first :], self.from_draft[first:]
        self.num_reported += len(new)
        self.finish_reported = self.finish_reason is not None
        return RequestOutput(self.request_id, new, from_draft, self.finish_reason)

    def snapshot(self) -> Snapshot:
        """Return what `restore` needs."""
        emissions = len(self.stats.emissions)
        return Snapshot(
            len(self.tokens), self.num_computed, self.finish_reason, self.stats.copy(), emissions, len(self.records)
        )

    def restore(self, saved: Snapshot) -> None:
        """Undo everything since `saved`."""
        del self.tokens[saved.num_tokens :]
        del self.from_draft[saved.num_tokens - self.num_prompt_tokens :]
        del self.records[saved.num_records :]
        self.num_computed, self.finish_reason, self.stats = saved.num_computed, saved.finish_reason, saved.stats
        del self.stats.emissions[saved.num_emissions :]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step gave one request."""

    request_id: int
    token_ids: list[int]  # newly emitted
    from_draft: list[bool]  # which of them were drafted and accepted; the others are the target's own
    finish_reason: str | None

    @property
    def num_accepted(self) -> int:
        return sum(self.from_draft)
