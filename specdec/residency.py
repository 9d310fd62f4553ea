"""Which requests have KV: admitted, given room step by step, preempted for others, found again by what begins alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from specdec.drafting import Drafting
from specdec.errors import OutOfCacheError
from specdec.interfaces import Observation
from specdec.kv.cache import KVCache
from specdec.request import Request
from specdec.scheduler import Claim, Scheduler, Work, most_blocks
from specdec.stats import EngineStats


class Residency:
    """Keeps scheduler, cache and drafter agreed on what is computed of each request."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, drafting: Drafting, stats: EngineStats) -> None:
        self._cache, self._scheduler, self._drafting, self._stats = cache, scheduler, drafting, stats
        cache.keeps_features = bool(drafting.drafter.features)  # what was kept without them is of no use then

    def admit(self) -> None:
        """Let waiting requests run while there is a place, and memory beside what runs now."""
        self._scheduler.admit(self._try_open)

    def _try_open(self, request: Request) -> bool:
        """Open a request's KV if there is room for it beside what runs, or nothing runs."""
        cache, request_id, own = self._cache, request.request_id, request.stats
        if cache.is_open(request_id):  # interrupted between opening and running it, or while being preempted
            request.num_computed = cache.context_len(request_id)
        else:
            if self._scheduler.running and not self._has_room(request):
                return False
            request.num_computed = cache.open(request_id, len(request.tokens) + request.num_remaining, request.tokens)
            self._stats.num_cached_tokens += request.num_computed
        if request.num_computed:
            self.tell_drafter(request)
        if own.admission_s is None:
            own.num_cached_tokens, own.admission_s = request.num_computed, time.perf_counter()
        return True

    def _has_room(self, request: Request) -> bool:
        """Tell whether there is memory for a request and those that run, for their tokens and some of those to come.

        Opening takes no memory: without counting what they need everyone would be let in on the same free blocks. And
        who is let in on the last block is preempted for the next token of another.
        """
        cache, ahead = self._cache, self._scheduler.tokens_ahead
        if cache.num_blocks is None:
            return True
        needed = cache.num_blocks_to_open(len(request.tokens), request.tokens)
        claims = [Claim(len(request.tokens), request.num_remaining, needed, 0)]
        for r in self._scheduler.running:
            needed = cache.num_blocks_to_reach(r.request_id, len(r.tokens))
            returned = cache.num_blocks_held_alone(r.request_id) if r.num_remaining < ahead else 0
            claims.append(Claim(len(r.tokens), r.num_remaining, needed, returned))
        return cache.has_room(most_blocks(claims, ahead, cache.block_tokens) * cache.block_tokens)

    def tell_drafter(self, request: Request) -> None:
        """Tell the drafter all of what is computed of a request, with its hidden states where they are kept."""
        features = None
        if self._cache.prefix_caching and self._drafting.drafter.features and request.num_computed:
            features = self._cache.features(request.request_id, 0, request.num_computed)
        self._drafting.tell_anew(request, features)

    def reserve(self, work: Sequence[Work]) -> list[Work]:
        """Reserve KV for a step's rows, best rank first; return the work there is memory for.

        Where memory runs out the request of the worst rank waits and is computed again later. Drafts get what is left
        when everybody has his rows: room that is given back after the step is no reason to compute anything twice.

        Raises:
            OutOfCacheError: a request that runs alone does not fit.
        """
        kept = self._scheduler.fit(work, self._take, self.preempt)
        return [self._with_drafts(w) for w in kept]

    def _take(self, w: Work, is_alone: bool) -> bool:
        """Reserve the rows of a request; see `Scheduler.fit`."""
        if is_alone:
            # It fits, as was checked when it came; if it does not, somebody else holds that memory.
            self._cache.reserve(w.request.request_id, w.num_rows)
            return True
        return self._fits(w, 0)

    def _with_drafts(self, w: Work) -> Work:
        """Return the work, without its drafts if there is no room for them beside everybody's rows."""
        if w.max_draft_tokens == 0 or self._fits(w, w.max_draft_tokens):
            return w
        return replace(w, max_draft_tokens=0)

    def _fits(self, w: Work, num_drafts: int) -> bool:
        """Reserve its rows and so many drafts; tell whether there was room. If not, an earlier reservation stands."""
        try:
            self._cache.reserve(w.request.request_id, w.num_rows + num_drafts)
        except OutOfCacheError:
            return False
        return True

    def preempt(self, request: Request) -> None:
        """Give up a running request's KV; its tokens stay, and it is computed again when it is admitted again."""
        self._scheduler.preempt(request)
        self._cache.release(request.request_id)
        self._drafting.release(request)
        if request.num_computed:
            request.stats.num_preemptions += 1
            self._stats.num_preemptions += 1
        elif not request.num_new_tokens and not request.stats.num_preemptions:
            request.stats.admission_s = None  # it was let in and sent back before anything was computed of it
        request.num_computed = 0

    def publish(self, work: Sequence[Work], observations: Sequence[Observation]) -> None:
        """Let other requests find the KV of what is committed now, and the hidden states that go with it."""
        cache = self._cache
        if not cache.prefix_caching:
            return
        for w, told in zip(work, observations, strict=True):
            request_id = w.request.request_id
            if told.features is not None:
                cache.store_features(request_id, w.request.num_computed - len(told.features), told.features)
            cache.publish(request_id, w.request.tokens)
