"""Who runs in this step, with how many rows and how many draft tokens. Pure Python, deterministic, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specdec.request import Request


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: `num_rows` pending tokens to run, and how much may be drafted behind them."""

    request: Request
    num_rows: int
    max_draft_tokens: int
    samples: bool  # the last pending token runs, so a next token is chosen
    is_prefill: bool  # prompt tokens; a decode step runs the one token that was emitted last


class Scheduler:
    """First come, first served; decode rows always run, prompts share a budget of rows per step."""

    def __init__(
        self,
        *,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        max_draft_tokens: int,
        draft_depth: int | None = None,  # of the drafter's trees, whose nodes are not all on one path; None = chains
    ) -> None:
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_draft_tokens, self.draft_depth = max_draft_tokens, draft_depth
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, running or waiting."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def admit(self, try_open: Callable[[Request], bool]) -> None:
        """Move waiting requests to running while there is a place and `try_open` finds memory for them."""
        while self.waiting and len(self.running) < self.max_batch_size:
            if not try_open(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def schedule(self) -> list[Work]:
        """Return this step's work; the same state gives the same answer."""
        budget = self.prefill_chunk_tokens
        work: list[Work] = []
        for request in self.running:
            if request.finish_reason is not None:
                continue  # the step that ended it was interrupted before it could hand its tokens out
            pending = request.num_pending
            if pending == 1 and request.num_computed >= request.num_prompt_tokens:
                work.append(Work(request, 1, self._most_drafts(request), samples=True, is_prefill=False))
                continue
            rows = min(pending, budget)
            if rows:
                budget -= rows
                work.append(Work(request, rows, 0, samples=rows == pending, is_prefill=True))
        return work

    def _most_drafts(self, request: Request) -> int:
        # The step emits one token beyond the drafts, so the last token is never worth drafting.
        room = request.num_remaining - 1
        whole_tree = self.draft_depth is not None and self.draft_depth <= room
        return self.max_draft_tokens if whole_tree else min(self.max_draft_tokens, room)

    def requests(self) -> Iterable[Request]:
        """Return every request the scheduler knows."""
        return [*self.running, *self.waiting]
