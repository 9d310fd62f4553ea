"""`specdec.Engine`: requests are added while others run, by steps or by asynchronous streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from specdec.api import LLM, Completion, Piece, Pieces
from specdec.engine import Engine as Core
from specdec.running import Job, start
from specdec.serving.kernel_caches import bound_kernel_caches
from specdec.serving.metrics import Finished, Metrics
from specdec.worker import Worker

log = logging.getLogger("specdec")
MAX_WAITING = 1024  # of a server; more at once are refused, so that nobody waits for what he will not get in time


class Engine:
    """A model, a drafter and a queue. All requests share its steps; each gets what it would get alone.

    Either the caller steps it, `add_request` and `step`, in one thread; or it is used from asyncio, `stream`, and steps
    itself in a thread of its own while any stream is open. Not both at once.

    Args:
        model: as for `LLM`.
        max_waiting: requests that may wait for a place; one more raises QueueFullError. None = any number.
        options: as for `LLM`: drafter, verifier, max_batch_size, prefill_chunk_tokens, prefix_caching, kv_dtype, ...
    """

    def __init__(self, model: Any, *, max_waiting: int | None = MAX_WAITING, **options: Any) -> None:
        bound_kernel_caches()  # before the first kernel runs
        self.llm = LLM(model, max_waiting=max_waiting, **options)
        self._core: Core = self.llm.engine
        self._open: dict[int, Pieces] = {}
        self._finished = Finished()
        self._worker = Worker()
        self._queues: dict[int, asyncio.Queue[Piece | BaseException]] = {}
        self._driver: asyncio.Task[None] | None = None

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
        """
        job, stops = self.llm.job("Engine.add_request", prompt, priority, draft, options)
        return self._add(job, stops)

    def step(self) -> list[Piece]:
        """Run one step and return what it gave; the last piece of a request holds its `completion`.

        A request whose own logits processor or stopping criterion raises ends with finish_reason "error"; the others
        go on.
        """
        try:
            self._core.step()
        except Exception as error:
            culprit = getattr(error, "specdec_request_id", None)
            if culprit is None:
                raise
            log.warning("request %s ends: its own processor or criterion raised %r", culprit, error)
            self._core.fail(culprit, error)  # the step did not happen: the next one runs without that request
        pieces: list[Piece] = []
        for request_id in list(self._open):
            pieces += self._take(request_id)
        return pieces

    def abort(self, request_id: int) -> Completion | None:
        """End a request and return what it has so far; None if it is over already.

        Raises:
            WrongThreadError: another thread uses the engine.
        """
        pieces = self._open.get(request_id)
        if pieces is None:
            return None
        self._core.abort(request_id)
        last = self._take(request_id)
        return last[-1].completion if last else None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a place."""
        return self._core.num_waiting

    @property
    def num_running(self) -> int:
        """How many requests share the steps."""
        return self._core.num_running

    def metrics(self) -> Metrics:
        """Return queue, KV and phase figures, percentiles over the requests that finished last."""
        core = self._core
        return self._finished.metrics(replace(core.stats), self.kv_usage(), core.num_running, core.num_waiting)

    def kv_usage(self) -> dict[str, float]:
        """Return how full the KV cache is; cheap enough for every step."""
        return self._core.target.cache.usage()

    def check_integrity(self) -> None:
        """Raise AssertionError if the books of the KV cache are wrong: a block leaks or is held twice."""
        self._core.target.cache.check_integrity()

    def _add(self, job: Job, stops: tuple[str, ...]) -> int:
        requests = start(self._core, [job])
        request_id = requests[0].request_id
        self._open[request_id] = Pieces(self.llm, self._core, requests, stops)
        return request_id

    def _take(self, request_id: int) -> list[Piece]:
        """Return a request's news, and let go of it after the last."""
        pieces = [replace(piece, index=request_id) for piece in self._open[request_id].take()]
        if pieces and pieces[-1].completion is not None:
            self._close(request_id)
        return pieces

    def _close(self, request_id: int) -> None:
        pieces = self._open.pop(request_id, None)
        if pieces is not None:
            (request,) = pieces.follow.requests
            self._core.forget(request_id)
            self._finished.add(request.stats, request.finish_reason)

    # ------------------------------------------------------------------ asyncio

    async def stream(
        self, prompt: Any, *, priority: int = 0, draft: bool = True, **options: Any
    ) -> AsyncIterator[Piece]:
        """Yield pieces of one answer as they come, while other streams of this engine run.

        Closing, cancelling or abandoning the stream ends its request.

        Args:
            prompt: as for `add_request`, like everything else.
            priority: likewise.
            draft: likewise.
            options: likewise.

        Raises:
            QueueFullError: at once, without waiting for the step that runs.
            InputError: likewise.
            ConfigError: likewise.
        """
        self._core.check_room()  # a full queue is no reason to wait for the thread
        job, stops = self.llm.job("Engine.stream", prompt, priority, draft, options)
        queue: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        added: list[int] = []

        def add() -> None:  # in the thread, where it ends even if this is cancelled meanwhile
            added.append(self._add(job, stops))
            self._queues[added[0]] = queue

        async with self._worker.using(self._core) as call:
            try:
                await call(add)
                self._drive()
                while True:
                    piece = await queue.get()
                    if isinstance(piece, BaseException):
                        raise piece
                    yield piece
                    if piece.completion is not None:
                        break
            finally:
                await call(self._drop, added)

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        """Return one answer as a whole; see `stream`."""
        async for piece in self.stream(prompt, **options):
            if piece.completion is not None:
                return piece.completion
        raise AssertionError("a stream ends with a completion")

    def _drop(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._queues.pop(request_id, None)
            self._close(request_id)

    def _drive(self) -> None:
        """Have the steps run as long as a stream is open."""
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._steps())

    async def _steps(self) -> None:
        while self._queues:
            try:
                pieces = await self._worker.call(self.step)
            except Exception as error:  # every stream hears of what is no single request's doing
                for queue in list(self._queues.values()):
                    queue.put_nowait(error)
                return
            for piece in pieces:
                waiting = self._queues.get(piece.index)
                if waiting is not None:
                    waiting.put_nowait(piece)
            if not pieces:
                await asyncio.sleep(0)
