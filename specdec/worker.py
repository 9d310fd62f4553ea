"""A thread that runs an engine for asyncio, and gives it back when nobody uses it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specdec.engine import Engine
from specdec.errors import WrongThreadError


class Worker:
    """Runs calls one after the other in one thread, which owns the engine while any asynchronous caller is busy."""

    def __init__(self) -> None:
        self._forget_thread()

    def _forget_thread(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._num_users = 0
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy begins without a thread

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_thread()

    def using(self, engine: Engine) -> Using:
        """Return a context whose value is `call(function, *args)`, an awaitable of its result from the thread."""
        return Using(self, engine)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the thread. If this is cancelled it still runs to its end there, before any later one."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specdec")
        return await asyncio.wrap_future(self._pool.submit(function, *args))

    def enter(self, engine: Engine) -> None:
        """Count a user, and take the engine from the thread that used it last.

        Raises:
            WrongThreadError: that thread is in the middle of something.
        """
        if self._pid != os.getpid():
            self._forget_thread()  # threads do not live on in a forked process
        if self._num_users == 0:
            if engine.has_unfinished:
                raise WrongThreadError("a stream is still open on this LLM; finish or close it before asynchronous use")
            engine.target.owner = None
        self._num_users += 1

    async def leave(self, engine: Engine) -> None:
        """Count a user off, and let go of the engine after the last."""
        self._num_users -= 1
        if self._num_users == 0:
            await self.call(engine.target.disown)

    def settle(self, engine: Engine) -> None:
        """Wait for what cancelled callers left to the thread, before the engine is used from another.

        Raises:
            WrongThreadError: asynchronous callers are still busy.
        """
        if self._pid != os.getpid():
            self._forget_thread()
            engine.target.owner = None
        if self._num_users:
            raise WrongThreadError("asynchronous calls are running on this LLM; await them before using it directly")
        if self._pool is not None:
            self._pool.submit(engine.target.disown).result()


class Using:
    """The time in which an asynchronous caller is busy. No generator: those are closed in any order at a loop's end."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker, self._engine = worker, engine

    async def __aenter__(self) -> Callable[..., Any]:
        self._worker.enter(self._engine)
        return self._worker.call

    async def __aexit__(self, *error: object) -> None:
        await self._worker.leave(self._engine)
