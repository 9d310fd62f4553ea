"""`specdec.Engine`: requests are added while others run, by steps or by asynchronous streams."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import Any

from specdec.api import LLM, Completion, Piece, Pieces
from specdec.engine import Engine as Core
from specdec.errors import ModelChangedError
from specdec.interrupts import uninterrupted
from specdec.kv.cache import KVCache
from specdec.running import Job, Steps, start
from specdec.serving.kernel_caches import bound_kernel_caches, warn_too_late
from specdec.serving.mail import Mail, Mailbox
from specdec.serving.metrics import Finished, Metrics, Moment, both
from specdec.stats import EngineStats
from specdec.worker import Worker

log = logging.getLogger("specdec")
MAX_WAITING = 1024  # of a server; more at once are refused, so that nobody waits for what he will not get in time
_LOOK_EVERY_S = 0.05  # how old what other threads see of the engine may become, beside the step that runs


class Engine:
    """A model, a drafter and a queue. All requests share its steps; each gets what it would get alone.

    Either the caller steps it, `add_request` and `step`, in one thread; or it is used from asyncio, `stream`, and steps
    itself in a thread of its own while any stream is open, for any number of event loops. Not both at once.

    Args:
        model: as for `LLM`.
        max_waiting: requests that may wait for a place; one more raises QueueFullError. None = any number.
        options: as for `LLM`: drafter, verifier, max_batch_size, prefill_chunk_tokens, prefix_caching, kv_dtype, ...
    """

    def __init__(self, model: Any, *, max_waiting: int | None = MAX_WAITING, **options: Any) -> None:
        is_too_late = bound_kernel_caches()  # before the first kernel runs
        self.llm = LLM(model, max_waiting=max_waiting, **options)
        if is_too_late and self.llm.engine.target.device.type == "cpu":
            warn_too_late()
        self._core: Core = self.llm.engine
        self._steps = Steps(self._core)
        self._open: dict[int, Pieces] = {}
        self._finished = Finished()
        self._past = EngineStats()  # of cores before this one
        self._is_compared = False  # the model, with what the core was built of, since the last step
        self._uncompared: list[int] = []  # requests that were added since then
        self._untold: list[Piece] = []  # of a step that Ctrl-C ended
        self._changing_in: int | None = None  # a process, as one that is forked meanwhile changes nothing
        self._look()
        self._worker = Worker()
        self._coming: set[Mailbox] = set()  # streams whose requests are on their way to the thread
        self._mail = Mail()
        self._turns_in: int | None = None  # the process whose thread steps by itself

    # ------------------------------------------------------------------ step by step

    def add_request(self, prompt: Any, *, priority: int = 0, draft: bool = True, **options: Any) -> int:
        """Queue a prompt and return the request's id, which its pieces carry as `index`.

        Args:
            prompt: a text or token ids.
            priority: a request of priority p runs as if it had come 64 p requests earlier.
            draft: False = nothing is drafted for it.
            options: as for `LLM.stream`: max_new_tokens, temperature, seed, stop, ...

        Raises:
            QueueFullError: as many requests wait as may; nothing has changed.
            InputError: the prompt is empty, too long or holds ids outside the vocabulary.
            ConfigError: an option is unknown or out of range.
            OutOfCacheError: the request can never fit the KV memory limit.
            ModelChangedError: the model's weights or modules changed while requests run.
            WrongThreadError: streams are open, or another thread uses the engine.
        """
        self._worker.settle(self._core)
        self._core.target.claim()  # before anything is touched
        job, stops = self.llm.job("Engine.add_request", prompt, priority, draft, options)
        if job.stop.max_new_tokens:
            self._core.check_room()  # before what takes longer
        with self._changing():
            self._follow_model()
            request_id = None
            try:
                with uninterrupted():
                    request_id = self._add(job, stops)
            except KeyboardInterrupt:  # the caller will never know the id
                self._close(request_id)
                raise
            return request_id

    def step(self) -> list[Piece]:
        """Run one step and return what it gave; the last piece of a request holds its `completion`.

        A request whose own logits processor or stopping criterion raises ends with finish_reason "error", and its
        completion's `error` is what was raised; the others go on.

        Raises:
            WrongThreadError: streams are open, or another thread uses the engine.
        """
        self._worker.settle(self._core)
        self._core.target.claim()  # before anything is touched
        return self._step()

    def abort(self, request_id: int) -> Completion | None:
        """End a request and return what it has so far; None if it is over already.

        While streams are open, any thread may end the request of one, which its pieces carry as `index`: the stream's
        last piece holds the completion then, and this returns None.

        Raises:
            WrongThreadError: another thread uses the engine.
        """
        if self._worker.is_used:
            self._worker.post(self._abort_stream, request_id)
            return None
        self._worker.settle(self._core)
        self._core.target.claim()  # before anything is touched
        if request_id not in self._open:
            return None
        with self._changing(), uninterrupted():
            self._core.abort(request_id)
            self._untold += self._take(request_id)
        own = [piece for piece in self._untold if piece.index == request_id]
        self._untold = [piece for piece in self._untold if piece.index != request_id]
        return own[-1].completion if own else None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open or self._untold)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a place."""
        return self._core.num_waiting

    @property
    def num_running(self) -> int:
        """How many requests share the steps."""
        return self._core.num_running

    def metrics(self) -> Metrics:
        """Return queue, KV and phase figures, percentiles over the requests that finished last.

        From another thread than the one that steps, streams included: KV and phases as they were after a recent step.
        """
        return self._finished.metrics(self._moment(), self.num_running, self.num_waiting)

    def kv_usage(self) -> dict[str, float]:
        """Return how full the KV cache is; cheap enough for every step. As of when: see `metrics`."""
        return self._moment().kv

    def check_integrity(self) -> None:
        """Raise AssertionError if the books of a KV cache, the drafter's own included, are wrong: a block leaks, say.

        Raises:
            WrongThreadError: streams are open, or another thread uses the engine.
        """
        self._worker.settle(self._core)
        target = self._core.target
        was_free = target.owner is None
        target.claim()
        try:
            for cache in self._caches():
                cache.check_integrity()
        finally:
            if was_free:
                target.disown()

    # ------------------------------------------------------------------ by whoever steps

    def _add(self, job: Job, stops: tuple[str, ...]) -> int:
        requests = start(self._core, [job])
        request_id = requests[0].request_id
        self._open[request_id] = Pieces(self.llm, self._core, requests, stops)
        if self._is_compared:
            self._uncompared.append(request_id)
        self._is_compared = True
        return request_id

    def _step(self) -> list[Piece]:
        with self._changing():
            if self._uncompared and not self._is_current():
                with uninterrupted():
                    self._refuse_uncompared()
            self._uncompared, self._is_compared = [], False
            if self._untold:
                return self._hand_over()
            try:
                news = self._steps.step()
            except BaseException as error:
                culprit = getattr(error, "specdec_request_id", None)
                if culprit is None:
                    raise
                log.warning("request %s ends: its own processor or criterion raised %r", culprit, error)
                self._core.fail(culprit, error)  # the step did not happen: the next one runs without that request
                news = [culprit]
            with uninterrupted():  # what is taken is handed out, or is there for the next step
                for request_id in list(self._open) if news is None else news:
                    self._untold += self._take(request_id)
                self._steps.taken()
        return self._hand_over()

    def _hand_over(self) -> list[Piece]:
        pieces, self._untold = self._untold, []
        return pieces

    def _take(self, request_id: int) -> list[Piece]:
        """Return a request's news, if it is one of this engine's, and let go of it after the last."""
        own = self._open.get(request_id)
        if own is None:
            return []
        own.follow.look()
        pieces = [replace(piece, index=request_id) for piece in own.take()]
        if pieces and pieces[-1].completion is not None:
            self._close(request_id)
        return pieces

    def _close(self, request_id: int | None) -> None:
        pieces = None if request_id is None else self._open.pop(request_id, None)
        if pieces is not None:
            (request,) = pieces.follow.requests
            self._core.forget(request.request_id)
            self._finished.add(request.stats, request.finish_reason)

    # ------------------------------------------------------------------ the model may change

    def _follow_model(self) -> None:
        """Build the core anew if the model has changed: KV and reordered weights are those of the earlier one.

        Looking takes milliseconds, so of several requests between two steps only the first is looked for; those after
        it are looked for together when the step begins.
        """
        if not self._open:
            core = self.llm.refresh()
            self._is_compared = False
            if core is not self._core:
                self._past = both(self._past, self._core.stats)
                self._core, self._steps = core, Steps(core)
                self._look()
        elif not self._is_compared and not self._is_current():
            raise ModelChangedError(_CHANGED)

    def _is_current(self) -> bool:
        return self._core is self.llm.engine and self.llm.is_current

    def _refuse_uncompared(self) -> None:
        """End the requests that were added after the model had changed."""
        while self._uncompared:
            request_id = self._uncompared.pop()
            if request_id in self._open:
                self._core.fail(request_id, ModelChangedError(_CHANGED))
                self._untold += self._take(request_id)

    # ------------------------------------------------------------------ what others see

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep `metrics` from looking at what is half done, and leave it something recent to show."""
        earlier, self._changing_in = self._changing_in, os.getpid()
        is_outermost = earlier != self._changing_in
        try:
            yield
        finally:
            self._changing_in = None if is_outermost else earlier
        if is_outermost and (not self._open or time.monotonic() - self._seen.at_s >= _LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        target, *drafters = self._caches()
        stats = both(self._past, self._core.stats)
        kv = drafters[0].usage() if drafters else None
        self._seen = Moment(stats, target.usage(), kv, time.monotonic())

    def _moment(self) -> Moment:
        if self._changing_in != os.getpid() and self._core.target.owner == threading.get_ident():
            self._look()  # nobody else changes anything now
        return self._seen

    def _caches(self) -> list[KVCache]:
        """Return the target's cache, and the drafter's own if it has one."""
        own = getattr(self._core.drafter, "own_cache", None)
        return [self._core.target.cache, *([] if own is None else [own])]

    # ------------------------------------------------------------------ asyncio

    async def stream(
        self, prompt: Any, *, priority: int = 0, draft: bool = True, **options: Any
    ) -> AsyncGenerator[Piece, None]:
        """Yield pieces of one answer as they come, while other streams of this engine run.

        Closing, cancelling or abandoning the stream ends its request; so does closing its event loop.

        Args:
            prompt: as for `add_request`, like everything else.
            priority: likewise.
            draft: likewise.
            options: likewise.

        Raises:
            QueueFullError: at once, without waiting for the step that runs.
            InputError: likewise.
            ConfigError: likewise.
            ModelChangedError: as for `add_request`.
            WrongThreadError: requests run that were added directly.
        """
        self._core.check_room(len(self._coming))  # a full queue is no reason to wait for the thread
        box = Mailbox()
        self._coming.add(box)
        added: list[int] = []
        try:
            job, stops = self.llm.job("Engine.stream", prompt, priority, draft, options)
            async with (user := self._worker.using(lambda: self._core, lambda: self._drop(added))) as call:
                await call(self._add_stream, job, stops, box, added)
                while True:
                    piece = await box.next()
                    user.is_over = piece.completion is not None
                    yield piece
                    if user.is_over:
                        break
        finally:
            self._coming.discard(box)

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        """Return one answer as a whole; see `stream`."""
        async with aclosing(self.stream(prompt, **options)) as pieces:
            async for piece in pieces:
                if piece.completion is not None:
                    return piece.completion
        raise AssertionError("a stream ends with a completion")

    def _add_stream(self, job: Job, stops: tuple[str, ...], box: Mailbox, added: list[int]) -> None:
        with self._changing():
            self._follow_model()
            self._coming.discard(box)  # from here on the core counts it
            added.append(self._add(job, stops))
            self._mail.open(added[0], box)
        self._drive()

    def _drop(self, request_ids: Sequence[int]) -> None:
        with self._changing(), ExitStack() as stack:  # each of them, also if dropping one fails
            for request_id in request_ids:
                self._mail.close(request_id)
                stack.callback(self._close, request_id)

    def _abort_stream(self, request_id: int) -> None:
        if request_id in self._open:
            with self._changing():
                self._core.abort(request_id)
                self._mail.send(self._take(request_id))
                self._mail.close(request_id)

    def _drive(self) -> None:
        """Have the thread take a turn, and further ones, as long as a stream is open."""
        here = os.getpid()  # a forked process has no such thread, whatever its parent had
        if self._mail and self._turns_in != here:
            self._worker.post(self._turn)
            self._turns_in = here

    def _turn(self) -> None:
        """Run one step for the open streams, between whatever else the thread is asked for."""
        self._turns_in = None
        try:
            if orphans := self._mail.orphans():
                self._drop(orphans)
            if self._mail:
                pieces = self._step()
                self._mail.send(pieces)
                for piece in pieces:
                    if piece.completion is not None:
                        self._mail.close(piece.index)
            self._drive()
        except BaseException as error:  # whatever it is: nobody else would tell those who wait
            self._end_streams(error)

    def _end_streams(self, error: BaseException) -> None:
        """Tell every stream of what is no single request's doing, and drop their requests.

        What dropping them raises is in the log: see `Worker.post`.
        """
        request_ids = self._mail.fail(error)
        self._untold.clear()  # of the same requests, whose streams have ended
        self._drop(request_ids)


_CHANGED = (
    "the model's weights or modules have changed while requests run that began with the earlier ones; let those "
    "finish, or abort them, and add this one again"
)
