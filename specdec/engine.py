"""The generation loop. `Engine.step()` reads: schedule, draft, one forward, verify, commit, observe, emit.

Knows no concrete drafter or verifier and holds no algorithm of its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.acceptance import Verdict, VerifierChoice, accepted_paths, judge
from specdec.draft_length import DraftLength, build_draft_length, guard
from specdec.drafting import Drafting
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError, InputError
from specdec.interfaces import Drafter, Forward, Noise, SamplingParams, Segment, TokenTree
from specdec.models.runner import ModelRunner
from specdec.models.step_times import step_times
from specdec.noise import KeyedNoise, draw_seed, fold_seed
from specdec.record import Keep, record_tokens
from specdec.request import Request, RequestOutput, Snapshot, StopRules
from specdec.residency import Residency
from specdec.sampling import check_sampling
from specdec.scheduler import Scheduler, Work
from specdec.stats import EngineStats, StepClock
from specdec.target_rows import StepRows
from specdec.trace import StepEvent, Trace
from specdec.tree import is_chain, select

log = logging.getLogger("specdec")
# Below this share of accepted draft tokens, over at least so many, a request is worth a warning.
_IDLE_SHARE, _IDLE_DRAFTS = 0.02, 64
_FIRST_FOLD = 1 << 32  # beyond the indices of return sequences, whose seeds are folded too
_REQUEST_IDS = itertools.count()  # unique over engines: a runner's cache may serve several


class Engine:
    """Requests in, tokens out, over one target runner, one drafter and its acceptance rules.

    Belongs to the thread that first uses it.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        verifiers: VerifierChoice,
        config: EngineConfig = EngineConfig(),
        draft_length: DraftLength | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.target, self.verifiers, self.config = target, verifiers, config.for_drafter(drafter)
        self.drafting = Drafting(drafter, target, self._warn_once)
        self.draft_length: DraftLength = draft_length or build_draft_length(
            config.draft_length,
            step_times=lambda: step_times(target),
            confidence_threshold=config.confidence_threshold,
        )
        self.trace = trace
        self.stats = EngineStats()
        self._scheduler = Scheduler(
            max_batch_size=config.max_batch_size,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            max_draft_tokens=self.config.max_draft_tokens or 0,  # a number now
            draft_depth=getattr(drafter, "draft_depth", None),
            max_step_tokens=config.max_step_tokens,
            max_waiting=config.max_waiting,
        )
        if target.cache.prefix_caching and drafter.features:
            target.size_features(drafter.features)
        self.residency = Residency(target.cache, self._scheduler, self.drafting, self.stats)
        self._requests: dict[int, Request] = {}
        # To be ended and to be forgotten: heard of from other threads, or in the middle of a step.
        self._aborted: deque[int] = deque()
        self._abandoned: deque[int] = deque()
        self._stepping_in: int | None = None  # a process: one that is forked meanwhile is in no step
        self._news: dict[int, Request] = {}  # those that may have something to hand out
        self._warned: set[str] = set()
        self._num_folded = 0  # requests that got a noise of their own; see `_own_seed`

    @property
    def _is_stepping(self) -> bool:
        return self._stepping_in is not None and self._stepping_in == os.getpid()

    @property
    def drafter(self) -> Drafter:
        return self.drafting.drafter

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        stop: StopRules,
        keep: Keep = Keep(),
        *,
        priority: int = 0,
        draft: bool = True,
    ) -> Request:
        """Queue a prompt and return its request; one with nothing to generate is finished at once.

        Args:
            prompt_token_ids: at least one token.
            sampling: how its tokens are drawn.
            stop: when it ends.
            keep: what is kept of each token in `Request.records`.
            priority: a request of priority p runs as if it had come 64 p requests earlier.
            draft: False = nothing is drafted for it.

        Raises:
            QueueFullError: as many requests wait as may.
            InputError: the prompt is empty, too long or holds ids outside the vocabulary.
            OutOfCacheError: the request can never fit the KV memory limit.
        """
        self.target.claim()
        self._drop_abandoned()
        check_sampling(sampling)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ConfigError(f"priority={priority!r}; allowed: an integer, higher is earlier")
        if not isinstance(draft, bool):
            raise ConfigError(f"draft={draft!r}; allowed: True or False")
        rule = self.verifiers.of(sampling, self.drafter.samples)
        if rule.needs_all_rows and sampling.processors:
            raise ConfigError(
                f"verifier {rule.name!r} scores all draft tokens at once, which logits processors cannot; "
                "use verifier='match' with them"
            )
        stop = self._check_prompt(prompt_token_ids, stop)
        if stop.max_total_tokens is not None and len(prompt_token_ids) + stop.max_new_tokens > stop.max_total_tokens:
            self._warn_once(
                "context",
                f"a prompt of {len(prompt_token_ids)} tokens and {stop.max_new_tokens} new ones pass the context limit "
                f"of {stop.max_total_tokens}; generation ends there",
            )
        total = min(len(prompt_token_ids) + stop.max_new_tokens, stop.max_total_tokens or 1 << 62)
        self.target.cache.check_fits(total)
        if stop.max_new_tokens:
            self._scheduler.check_room()
        seed = sampling.seed
        if seed is None:
            # Greedy output needs no randomness: test drafters get the same one every time, and the caller's global
            # generator is left alone, as transformers leaves it.
            seed = 0 if sampling.greedy else draw_seed()
        if not rule.couples_draft:
            seed = self._own_seed(seed)
        request = Request(
            next(_REQUEST_IDS), list(prompt_token_ids), sampling, stop, seed, keep=keep, priority=priority, draft=draft
        )
        request.stats.arrival_s = time.perf_counter()
        self._requests[request.request_id] = request
        if stop.max_new_tokens == 0:
            request.finish_reason = "length"
            self._news[request.request_id] = request
        else:
            self._scheduler.add(request)
        return request

    def _own_seed(self, seed: int) -> int:
        """Return the seed of a request under a rule whose output depends on what is drafted.

        Where the acceptances of one request decide on the drafts of another, two that draw with the same noise would be
        biased: the second is drafted for where that noise accepts, and not where it refuses. That is so where the
        policy or the drafter learns over requests, and where requests share a bound on the rows of a step or on KV, so
        that one which is further leaves more to the others. There only the first keeps the seed as it was given.
        """
        remembers = self.draft_length.remembers or getattr(self.drafter, "remembers", False)
        if not remembers and self.config.max_step_tokens is None and self.target.cache.max_bytes is None:
            return seed
        if not remembers and not self.has_unfinished:
            self._num_folded = 0  # nobody is left who could decide on anything
            self._scheduler.forget_preemptions()
        index, self._num_folded = self._num_folded, self._num_folded + 1
        return fold_seed(seed, _FIRST_FOLD + index) if index else seed

    def _check_prompt(self, prompt: Sequence[int], stop: StopRules) -> StopRules:
        """Return the stop rules with the model's own context limit in them."""
        limit = self.target.max_positions
        if limit is not None:
            limit = min(limit, stop.max_total_tokens or limit)
            stop = replace(stop, max_total_tokens=limit)
        if not prompt:
            raise InputError("the prompt has no tokens; give at least one (a BOS token will do)")
        if stop.max_total_tokens is not None and len(prompt) >= stop.max_total_tokens:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and the context limit is {stop.max_total_tokens}, prompt and new "
                "tokens together; shorten the prompt"
            )
        bad = next((t for t in prompt if not 0 <= t < self.target.vocab_size), None)
        if bad is not None:
            raise InputError(f"prompt token id {bad} is outside the target's vocabulary of {self.target.vocab_size}")
        return stop

    def request(self, request_id: int) -> Request:
        """Return a request's state: tokens, finish reason, counters.

        Raises:
            InputError: the id is unknown or was forgotten.
        """
        if request_id not in self._requests:
            raise InputError(f"request {request_id} is unknown to this engine or was forgotten")
        return self._requests[request_id]

    def abort(self, request_id: int) -> None:
        """Stop a request and free what it holds; its tokens stay readable until `forget`.

        Called in the middle of a step, by a processor, say, it waits for the end of the step.
        """
        self.target.claim()
        request = self.request(request_id)
        if self._is_stepping:
            self._aborted.append(request_id)
            return
        if request.finish_reason is None:
            self._retire(request, "abort")

    def fail(self, request_id: int, error: BaseException) -> None:
        """End a request whose own processor or criterion raised; `Request.error` says what."""
        self.target.claim()
        request = self.request(request_id)
        request.error = error
        self._retire(request, "error")

    def forget(self, request_id: int) -> None:
        """Drop a request and everything about it; unknown ids are ignored.

        From a thread that does not own the engine, such as one in which an abandoned stream is collected, or in the
        middle of a step, in which one may be collected too, the request is dropped when the owner next uses the engine.
        """
        if self._is_stepping or not self.target.may_use():
            self._abandoned.append(request_id)
            return
        self.target.claim()
        request = self._requests.get(request_id)
        if request is not None:
            self._retire(request, request.finish_reason or "abort")
            del self._requests[request_id]
            self._news.pop(request_id, None)

    def reset(self) -> None:
        """Forget everything learned from past requests: by the drafter, the draft-length policy, the prefix caches.

        Raises:
            InputError: a request is unfinished.
        """
        self.target.claim()
        if self.has_unfinished:
            raise InputError(f"{self.num_running + self.num_waiting} requests are unfinished; forget them first")
        self.drafter.reset()
        self.draft_length.reset()
        for cache in (self.target.cache, getattr(self.drafter, "own_cache", None)):
            if cache is not None:
                cache.forget_prefixes()
        self._num_folded = 0
        self._scheduler.forget_preemptions()

    def _retire(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._news[request.request_id] = request
        self._scheduler.remove(request)
        self.target.cache.release(request.request_id)
        self._warn_if_idle(request)
        self.drafting.release(request)
        guard.release(self.draft_length, request.request_id, self._warn_once)

    def _drop_abandoned(self) -> None:
        if self._is_stepping:
            return
        while self._aborted:
            request = self._requests.get(self._aborted.popleft())
            if request is not None and request.finish_reason is None:
                self._retire(request, "abort")
        while self._abandoned:
            self.forget(self._abandoned.popleft())

    def check_room(self, num_coming: int = 0) -> None:
        """Raise QueueFullError if no further request may wait beside those coming. May be called from any thread."""
        self._scheduler.check_room(num_coming)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def has_unfinished(self) -> bool:
        if (self._abandoned or self._aborted) and self.target.may_use():
            self._drop_abandoned()
        return bool(self._scheduler.running or self._scheduler.waiting)

    # ------------------------------------------------------------------ the step

    def step(self) -> list[RequestOutput]:
        """Run one step of every scheduled request and return what was emitted.

        A step that raises did not happen: tokens, KV and counters are as before it. Who was let in or preempted at its
        beginning stays so.

        Raises:
            ConfigError: a step is running: a processor, criterion or drafter must not step the engine it runs in.
        """
        self.target.claim()
        if self._is_stepping:
            raise ConfigError("the engine was stepped from inside of its own step; use another LLM or Engine there")
        self._drop_abandoned()
        self._stepping_in = os.getpid()
        try:
            return self._step()
        finally:
            self._stepping_in = None

    def _step(self) -> list[RequestOutput]:
        clock = StepClock()
        self.residency.admit()
        work = guard.allot(self.draft_length, self._scheduler.schedule(), self._warn_once)
        work = self.residency.reserve(work)
        if not work:
            return self._emit()
        self._news.update((w.request.request_id, w.request) for w in work)
        stats = replace(self.stats)
        saved = [(w.request, w.request.snapshot(), self.target.cache.context_len(w.request.request_id)) for w in work]
        told = False
        try:
            with torch.inference_mode():
                tree, noise = self._draft(work, clock)
                forward = self._forward(work, tree)
                verdicts, rows = self._verify(work, tree, noise, forward)
                clock.verify_s = time.perf_counter() - clock.start - clock.draft_s
                self._record(work, verdicts, rows)
                self._commit(work, verdicts)
                told = True
                self.residency.publish(work, self.drafting.observe(work, verdicts, tree, forward))
                self._count(work, verdicts, clock)
                self._tell_watchers(work, verdicts, tree, rows, clock)
        except BaseException:
            self.stats.restore(stats)
            self._undo(saved, told)
            raise
        return self._emit()

    def _draft(self, work: Sequence[Work], clock: StepClock) -> tuple[TokenTree, Noise]:
        """Return the trees of the B requests that choose a token in this step, and the step's noise."""
        noise = self._noise([w.request for w in work if w.samples])
        start = time.perf_counter()
        tree, asked = self.drafting.trees(work, self._noise, self.draft_length.min_confidence)
        if asked:
            clock.draft_s = time.perf_counter() - start
        return tree, noise

    def _noise(self, requests: Sequence[Request]) -> KeyedNoise:
        chosen = [self.verifiers.of(r.sampling, self.drafter.samples) for r in requests]
        return KeyedNoise(
            torch.tensor([r.seed for r in requests], dtype=torch.int64, device=self.target.device),
            torch.tensor([len(r.tokens) - 1 for r in requests], dtype=torch.int64, device=self.target.device),
            torch.tensor([v.couples_draft for v in chosen], dtype=torch.bool, device=self.target.device),
        )

    def _forward(self, work: Sequence[Work], tree: TokenTree) -> Forward:
        """Run every request's pending tokens and draft nodes in one packed forward."""
        segments: list[Segment] = []
        sizes = tree.num_nodes.tolist()
        b = 0
        for w in work:
            request = w.request
            start = request.num_computed
            if not w.samples:
                ids = torch.tensor(request.tokens[start : start + w.num_rows], dtype=torch.int64)
                segments.append(Segment(request.request_id, ids, None, torch.empty(0, dtype=torch.int64)))
                continue
            n = sizes[b]
            ids = tree.token_ids[b, :n]
            if w.num_rows > 1:
                earlier = torch.tensor(request.tokens[start : start + w.num_rows - 1], dtype=torch.int64)
                ids = torch.cat([earlier.to(ids.device), ids])
            parents = None
            if n > 2 and not is_chain(tree.parents[b, :n]):
                assert w.num_rows == 1, "trees are drafted behind one pending token"
                parents = tree.parents[b, :n]
            rows = torch.arange(w.num_rows - 1, w.num_rows - 1 + n)
            segments.append(Segment(request.request_id, ids, parents, rows))
            b += 1
        return self.target.forward(segments, self.drafter.features)

    def _verify(
        self, work: Sequence[Work], tree: TokenTree, noise: Noise, forward: Forward
    ) -> tuple[list[Verdict], StepRows]:
        """Return one verdict per work item, and the rows; requests under the same rule are verified together."""
        sampling = [w.request for w in work if w.samples]
        first = torch.cumsum(tree.num_nodes, 0) - tree.num_nodes
        rows = StepRows(forward.logits, first, sampling, tree)
        with_probs = self.drafter.samples and tree.draft_probs is not None
        paths: list[tuple[list[int], int]] = [([], 0)] * len(sampling)
        vocab_size = int(forward.logits.shape[-1])
        for verifier, members in self.verifiers.groups([r.sampling for r in sampling], with_probs):
            part, index = tree, None
            if len(members) < len(sampling):
                index = torch.tensor(members, dtype=torch.int64, device=tree.token_ids.device)
                part = select(tree, index)
                noise = self._noise([sampling[i] for i in members])
            result = verifier.verify(part, rows if index is None else rows.select(index, part), noise)
            for i, answer in zip(members, accepted_paths(result, verifier, part, vocab_size), strict=True):
                paths[i] = answer
        return judge(work, paths, tree), rows

    def _record(self, work: Sequence[Work], verdicts: Sequence[Verdict], rows: StepRows) -> None:
        """Keep what was asked for of each token this step emits."""
        choosing = [(w.request, v) for w, v in zip(work, verdicts, strict=True) if w.samples]
        for row, (request, verdict) in enumerate(choosing):
            if request.keep and verdict.tokens:
                assert verdict.path is not None, "a request that emits has a path"
                # Each token was chosen after the node of the one before it.
                nodes = [0, *verdict.path.tolist()][: len(verdict.tokens)]
                logits, scores = rows.logits(row, nodes), rows.scores(row, nodes)
                request.records += record_tokens(request.keep, verdict.tokens, logits, scores)

    def _commit(self, work: Sequence[Work], verdicts: Sequence[Verdict]) -> None:
        for w, verdict in zip(work, verdicts, strict=True):
            request = w.request
            self.target.cache.commit(request.request_id, verdict.kept)
            request.num_computed += len(verdict.kept)
            request.take(verdict.tokens, verdict.num_accepted, verdict.finish_reason)

    def _count(self, work: Sequence[Work], verdicts: Sequence[Verdict], clock: StepClock) -> None:
        clock.stop()
        num_rows = sum(w.num_rows + v.drafted for w, v in zip(work, verdicts, strict=True)) or 1
        stats = self.stats
        stats.num_drafter_errors = self.drafting.num_errors
        stats.record_step(clock, sum(w.num_rows for w in work if w.is_prefill), num_rows)
        for w, verdict in zip(work, verdicts, strict=True):
            own = w.request.stats
            if verdict.tokens:
                own.emissions.append((clock.end, len(verdict.tokens)))
            if w.is_prefill:
                own.record_prefill(clock, w.num_rows, num_rows)
                continue
            own.record_times(clock)
            own.record_decode(
                drafted=verdict.drafted,
                depth=verdict.depth,
                accepted=verdict.num_accepted,
                emitted=len(verdict.tokens),
            )
            stats.num_decode_tokens += len(verdict.tokens)

    def _tell_watchers(
        self, work: Sequence[Work], verdicts: Sequence[Verdict], tree: TokenTree, rows: StepRows, clock: StepClock
    ) -> None:
        if self.trace is not None:
            number, total = self.stats.num_steps, time.perf_counter() - clock.start
            self.trace.record(StepEvent(number, work, verdicts, tree, rows, clock.draft_s, clock.verify_s, total))
        guard.learn(self.draft_length, work, verdicts, clock.draft_s, self._warn_once)  # last: it is not undone

    def _emit(self) -> list[RequestOutput]:
        """Hand out every token not handed out yet, so that an interrupted step loses none."""
        news = sorted((r for r in self._news.values() if r.has_news), key=lambda r: r.request_id)
        for request in news:
            if request.finish_reason is not None:
                self._retire(request, request.finish_reason)
        # Only now, and in one go: had releasing been interrupted, the next step would hand all of it out.
        outputs = [request.hand_out() for request in news]
        self._news.clear()
        return outputs

    # ------------------------------------------------------------------ keeping the promises

    def _undo(self, saved: Sequence[tuple[Request, Snapshot, int]], told: bool) -> None:
        """Put every request back to before the step, and tell the drafter if it heard of what did not happen."""
        for request, snapshot, context_len in saved:
            request.restore(snapshot)
            self.target.cache.restore(request.request_id, context_len)
        if told:
            for request, _, _ in saved:
                self.residency.tell_drafter(request)

    def _warn_if_idle(self, request: Request) -> None:
        """Say once that drafting cost more than it gave: what goes unnoticed is never switched off."""
        own = request.stats
        if own.num_draft_tokens >= _IDLE_DRAFTS and own.num_accepted_tokens < _IDLE_SHARE * own.num_draft_tokens:
            self._warn_once(
                "idle",
                f"drafter {self.drafter.name!r}: {own.num_accepted_tokens} of {own.num_draft_tokens} draft tokens were "
                "accepted, so drafting probably costs more than it saves here; compare with drafter='none'",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        # By kind: a message that names this step's sizes would be a new one at every step.
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", message)
