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
from specdec.scheduler import Scheduler, Work
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
        """Open a request's KV if all its pending tokens and a first draft fit."""
        cache, request_id = self._cache, request.request_id
        if cache.is_open(request_id):  # interrupted between opening and running it, or while being preempted
            request.num_computed = cache.context_len(request_id)
            return True
        if self._scheduler.running and not cache.has_room(len(request.tokens) + 1 + self._scheduler.max_draft_tokens):
            return False
        request.num_computed = cache.open(request_id, len(request.tokens) + request.num_remaining, request.tokens)
        if request.num_computed:
            if not request.new_tokens:
                request.stats.num_cached_tokens = request.num_computed
            self._stats.num_cached_tokens += request.num_computed
            self.tell_drafter(request)
        if request.stats.admission_s is None:
            request.stats.admission_s = time.perf_counter()
        return True

    def tell_drafter(self, request: Request) -> None:
        """Tell the drafter all of what is computed of a request, with its hidden states where they are kept."""
        features = None
        if self._cache.prefix_caching and self._drafting.drafter.features and request.num_computed:
            features = self._cache.features(request.request_id, 0, request.num_computed)
        self._drafting.tell_anew(request, features)

    def reserve(self, work: Sequence[Work]) -> list[Work]:
        """Reserve KV for a step's rows, best rank first; return the work there is memory for.

        Where memory runs out, first the drafts of a request are given up and then the request of the worst rank, which
        waits and is computed again later.

        Raises:
            OutOfCacheError: a request that runs alone does not fit.
        """
        reserved: list[Work] = []
        for w in work:
            while w.request in self._scheduler.running:  # else it was preempted, for itself or one before it
                fitting = self._reserve_one(w)
                if fitting is not None:
                    reserved.append(fitting)
                    break
                victim = self._scheduler.victim()
                if victim is None:
                    # Alone it fits, as was checked when it came; so this is memory that somebody else holds.
                    self._cache.reserve(w.request.request_id, w.num_rows)
                    continue
                self.preempt(victim)
                reserved = [r for r in reserved if r.request is not victim]
        return reserved

    def _reserve_one(self, w: Work) -> Work | None:
        """Return the work as far as there is memory for it, without its drafts if need be; None = for nothing."""
        for most in dict.fromkeys((w.max_draft_tokens, 0)):
            try:
                self._cache.reserve(w.request.request_id, w.num_rows + most)
            except OutOfCacheError:
                continue
            return w if most == w.max_draft_tokens else replace(w, max_draft_tokens=0)
        return None

    def preempt(self, request: Request) -> None:
        """Give up a running request's KV; its tokens stay, and it is computed again when it is admitted again."""
        self._scheduler.preempt(request)
        self._cache.release(request.request_id)
        self._drafting.release(request)
        request.num_computed = 0
        request.stats.num_preemptions += 1
        self._stats.num_preemptions += 1

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
