"""A thread that runs an engine for asyncio, and gives it back when nobody uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from specdec.engine import Engine
from specdec.errors import WrongThreadError

Call = Callable[..., Awaitable[Any]]


class Worker:
    """Runs calls one after the other in one thread, which owns the engine while any asynchronous caller is busy."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._num_users = 0

    @asynccontextmanager
    async def using(self, engine: Engine) -> AsyncIterator[Call]:
        """Give `call(function, *args)`, an awaitable of its result from the thread.

        A call that is cancelled still runs to its end there, before any later one.

        Raises:
            WrongThreadError: another thread owns the engine, or a stream is open in this one.
        """
        if self._num_users == 0:
            if engine.has_unfinished:
                raise WrongThreadError("a stream is still open on this LLM; finish or close it before asynchronous use")
            engine.target.disown()
        self._num_users += 1
        try:
            yield self._call
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                await self._call(engine.target.disown)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specdec")
        return await asyncio.wrap_future(self._pool.submit(function, *args))

    def settle(self, engine: Engine) -> None:
        """Wait for what cancelled callers left to the thread, before the engine is used from another.

        Raises:
            WrongThreadError: asynchronous callers are still busy.
        """
        if self._num_users:
            raise WrongThreadError("asynchronous calls are running on this LLM; await them before using it directly")
        if self._pool is not None:
            self._pool.submit(engine.target.disown).result()
