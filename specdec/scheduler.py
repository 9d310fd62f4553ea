"""Who runs in this step, with how many rows and how many draft tokens. Pure Python, deterministic, no torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specdec.errors import QueueFullError
from specdec.request import Request

# What a point of priority is worth, in arrivals: so many requests that came earlier are passed. Ranks are fixed when a
# request arrives, so whoever waits is reached in the end, however many come after it.
ARRIVALS_PER_PRIORITY = 64


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: `num_rows` pending tokens to run, and how much may be drafted behind them."""

    request: Request
    num_rows: int
    max_draft_tokens: int
    samples: bool  # the last pending token runs, so a next token is chosen
    is_prefill: bool  # prompt tokens; a decode step runs the one token that was emitted last


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
        max_waiting: requests that may wait; None = any number.
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
    ) -> None:
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_draft_tokens, self.draft_depth = max_draft_tokens, draft_depth
        self.max_step_tokens, self.max_waiting = max_step_tokens, max_waiting
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self._num_arrived = 0

    def check_room(self) -> None:
        """Raise QueueFullError if no further request may wait."""
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already, which is what max_waiting allows, and {len(self.running)} "
                "run; try again later, or raise max_waiting"
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
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def admit(self, try_open: Callable[[Request], bool]) -> None:
        """Move waiting requests to running while there is a place and `try_open` finds memory for them.

        No request passes one of a better rank for which there is no memory: that one would wait forever.
        """
        while self.waiting and len(self.running) < self.max_batch_size:
            if not try_open(self.waiting[0]):
                return
            insort(self.running, self.waiting.pop(0), key=_rank)

    def preempt(self, request: Request) -> None:
        """Move a running request back to where it waits by its rank, whether or not others may still come."""
        self.running.remove(request)
        insort(self.waiting, request, key=_rank)

    def victim(self) -> Request | None:
        """Return the running request that is preempted first, the one of the worst rank; None if at most one runs."""
        unfinished = [r for r in self.running if r.finish_reason is None]
        return unfinished[-1] if len(self.running) > 1 and unfinished else None

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
        for i, request in enumerate(r for r in running if _decodes(r)):
            most = min(self._most_drafts(request), left // (num_decoding - i))
            most = most if request.draft else 0
            left -= most
            work[request.request_id] = Work(request, 1, most, samples=True, is_prefill=False)
        return [work[r.request_id] for r in running if r.request_id in work]

    def _most_drafts(self, request: Request) -> int:
        # The step emits one token beyond the drafts, so the last token is never worth drafting.
        room = request.num_remaining - 1
        whole_tree = self.draft_depth is not None and self.draft_depth <= room
        return self.max_draft_tokens if whole_tree else min(self.max_draft_tokens, room)

    def requests(self) -> Iterable[Request]:
        """Return every request the scheduler knows."""
        return [*self.running, *self.waiting]


def _rank(request: Request) -> tuple[int, int]:
    return request.rank, request.request_id


def _decodes(request: Request) -> bool:
    return request.num_pending == 1 and request.num_computed >= request.num_prompt_tokens


def _chunk(request: Request, budget: int) -> Work:
    """Return the next rows of a prompt, or of what a preempted request had before.

    The token such a request emitted last is left to a decode step, as it would have been without the preemption.
    """
    is_resumed = request.num_new_tokens > 0
    rows = min(request.num_pending - is_resumed, budget)
    return Work(request, rows, 0, samples=rows == request.num_pending, is_prefill=True)
