"""Who runs in this step, with how many rows and how many draft tokens. Pure Python, deterministic, no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.errors import QueueFullError
from specdec.request import Request

# What a point of priority is worth, in arrivals: so many requests that came earlier are passed. Ranks are fixed when a
# request arrives, so whoever waits is reached in the end, however many come after it.
ARRIVALS_PER_PRIORITY = 64
# How many tokens ahead memory is looked at before a request is let in: at least LEAST_AHEAD; more after a preemption,
# which shows that it was too few, and less again while there is none. Answers that end early make room nobody can
# foresee, so looking ahead to everybody's `max_new_tokens` would leave most of the memory idle.
LEAST_AHEAD, _MOST_AHEAD = 32, 4096
_AHEAD_PER_PREEMPTION, _AHEAD_PER_STEP = 1.5, 0.99


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: `num_rows` pending tokens to run, and how much may be drafted behind them."""

    request: Request
    num_rows: int
    max_draft_tokens: int
    samples: bool  # the last pending token runs, so a next token is chosen
    is_prefill: bool  # prompt tokens; a decode step runs the one token that was emitted last


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request takes of the free blocks of memory from now on."""

    num_tokens: int  # that it has
    num_remaining: int  # that it may get
    num_blocks: int  # that it still needs for those it has
    num_returned: int  # of those it holds: that are free when it ends


def most_blocks(claims: Sequence[Claim], ahead: int, block_tokens: int) -> int:
    """Return how many free blocks are taken at once, at most, while each request gets up to `ahead` more tokens."""

    def taken(tokens: int) -> int:
        total = 0
        for c in claims:
            if c.num_remaining < tokens:
                total -= c.num_returned
            else:  # the last token has no KV yet
                total += (
                    c.num_blocks + -(-(c.num_tokens + tokens - 1) // block_tokens) - -(-c.num_tokens // block_tokens)
                )
        return total

    # Between two ends the number only grows.
    return max(taken(tokens) for tokens in {min(ahead, c.num_remaining) for c in claims})


class Scheduler:
    """Decode rows always run; prompts share a budget of rows per step, by rank: arrival, moved ahead by priority.

    Args:
        max_batch_size: requests that run at once.
        prefill_chunk_tokens: rows per step for prompts. Small: running requests wait little for the prompts of others.
            Large: prompts are done soon.
        max_step_tokens: rows of a step, drafts included, that drafts and prompts must stay within; decode rows run in
            any case. None = no bound.
        max_draft_tokens: of one request in one step.
        draft_depth: of the drafter's trees, whose nodes are not all on one path; None = it drafts chains.
        max_waiting: requests that may wait beside those that fit the free places; None = any number.
        least_ahead: see `tokens_ahead`.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        max_draft_tokens: int,
        draft_depth: int | None = None,
        max_step_tokens: int | None = None,
        max_waiting: int | None = None,
        least_ahead: int = LEAST_AHEAD,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_draft_tokens, self.draft_depth = max_draft_tokens, draft_depth
        self.max_step_tokens, self.max_waiting = max_step_tokens, max_waiting
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self._num_arrived = 0
        self._lacks_memory = False  # the first that waits found none in the last step
        self.least_ahead, self._ahead = least_ahead, float(least_ahead)

    def check_room(self, num_coming: int = 0) -> None:
        """Raise QueueFullError if no further request may wait; those that the next step lets in do not count.

        Args:
            num_coming: requests that are on their way to `add` and count as waiting.
        """
        if self.max_waiting is None:
            return
        has_places = not (self._lacks_memory and self.running)
        places = max(0, self.max_batch_size - len(self.running)) if has_places else 0
        num_waiting = len(self.waiting) + num_coming
        if num_waiting - places >= self.max_waiting:
            raise QueueFullError(
                f"{num_waiting} requests wait and {len(self.running)} run, and max_waiting={self.max_waiting} "
                "allows no more; try again later, or raise max_waiting"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: too many wait already.
        """
        self.check_room()
        self._num_arrived += 1
        request.rank = self._num_arrived - ARRIVALS_PER_PRIORITY * request.priority
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Forget a request, running or waiting."""
        if _take(self.waiting, request):
            self._lacks_memory = False
        _take(self.running, request)

    def admit(self, try_open: Callable[[Request], bool]) -> None:
        """Move waiting requests to running while there is a place and `try_open` finds memory for them.

        No request passes one of a better rank for which there is no memory: that one would wait forever.
        """
        self._lacks_memory, self._ahead = False, max(self.least_ahead, self._ahead * _AHEAD_PER_STEP)
        while self.waiting and len(self.running) < self.max_batch_size:
            request = self.waiting[0]
            if request not in self.running:  # else an interruption left it in both lists, as it is left here
                if not try_open(request):
                    self._lacks_memory = True
                    return
                insort(self.running, request, key=_rank)
            del self.waiting[0]

    @property
    def tokens_ahead(self) -> int:
        """How many tokens of everybody there must be room for when a request is let in beside others."""
        return int(self._ahead)

    def forget_preemptions(self) -> None:
        """Look ahead as at first: what earlier requests came to decides on nobody later."""
        self._ahead = float(self.least_ahead)

    def preempt(self, request: Request) -> None:
        """Move a running request back to where it waits by its rank, whether or not others may still come."""
        self._ahead = min(_MOST_AHEAD, self._ahead * _AHEAD_PER_PREEMPTION)
        _take(self.waiting, request)  # where an interruption may have left it
        insort(self.waiting, request, key=_rank)
        _take(self.running, request)

    def victim(self) -> Request | None:
        """Return the running request that is preempted first, the one of the worst rank; None if at most one runs."""
        unfinished = [r for r in self.running if r.finish_reason is None]
        return unfinished[-1] if len(self.running) > 1 and unfinished else None

    def fit(
        self, work: Sequence[Work], take: Callable[[Work, bool], bool], preempt: Callable[[Request], None]
    ) -> list[Work]:
        """Return the work there is memory for, the best rank first; requests of the worst rank give theirs up for it.

        Args:
            work: of `schedule`.
            take: takes the memory for a request's rows and tells whether there was any; with True, for a request that
                runs alone, it raises if there is none.
            preempt: gives up a request's memory; has to call `Scheduler.preempt`.
        """
        kept: list[Work] = []
        for w in work:
            while w.request in self.running:  # else it was preempted, for itself or one before it
                victim = self.victim()
                if take(w, victim is None):
                    kept.append(w)
                    break
                assert victim is not None, "a request that runs alone has memory, or that was said"
                preempt(victim)
                kept = [k for k in kept if k.request is not victim]
        return kept

    def schedule(self) -> list[Work]:
        """Return this step's work; the same state gives the same answer."""
        running = [r for r in self.running if r.finish_reason is None]  # others wait to hand their last tokens out
        num_decoding = sum(_decodes(r) for r in running)
        left = 1 << 62 if self.max_step_tokens is None else max(0, self.max_step_tokens - num_decoding)
        # Prompts go before drafts: one more request that decodes is worth more rows than any draft.
        work: dict[int, Work] = {}
        budget = min(self.prefill_chunk_tokens, left)
        if not num_decoding and running:
            budget = max(budget, 1)  # a step without any row would be one of many
        for request in running:
            if not _decodes(request) and budget > 0:
                chunk = _chunk(request, budget)
                work[request.request_id] = chunk
                budget, left = budget - chunk.num_rows, left - chunk.num_rows
        decoding = [r for r in running if _decodes(r)]
        num_drafting = sum(r.draft for r in decoding)
        for request in decoding:
            most = 0
            if request.draft:
                most = min(self._most_drafts(request), left // num_drafting)
                left, num_drafting = left - most, num_drafting - 1
            work[request.request_id] = Work(request, 1, most, samples=True, is_prefill=False)
        return [work[r.request_id] for r in running if r.request_id in work]

    def _most_drafts(self, request: Request) -> int:
        # The step emits one token beyond the drafts, so the last token is never worth drafting.
        room = request.num_remaining - 1
        whole_tree = self.draft_depth is not None and self.draft_depth <= room
        return self.max_draft_tokens if whole_tree else min(self.max_draft_tokens, room)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank, request.request_id


def _take(queue: list[Request], request: Request) -> bool:
    """Remove a request from a list by rank; tell whether it was there."""
    place = bisect_left(queue, _rank(request), key=_rank)
    if place == len(queue) or queue[place] is not request:
        return False
    del queue[place]
    return True


def _decodes(request: Request) -> bool:
    return request.num_pending == 1 and request.num_computed >= request.num_prompt_tokens


def _chunk(request: Request, budget: int) -> Work:
    """Return the next rows of a prompt, or of what a preempted request had before.

    The token such a request emitted last is left to a decode step, as it would have been without the preemption.
    """
    is_resumed = request.num_new_tokens > 0
    rows = min(request.num_pending - is_resumed, budget)
    return Work(request, rows, 0, samples=rows == request.num_pending, is_prefill=True)
