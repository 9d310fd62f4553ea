"""A thread that runs an engine for asyncio, and gives it back when nobody uses it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from specdec.engine import Engine
from specdec.errors import WrongThreadError

log = logging.getLogger("specdec")


class Worker:
    """Runs calls one after the other in one thread, which owns the engine while any asynchronous caller is busy.

    Callers may be in several event loops. Those of a loop that was closed before they could leave are counted off, and
    what they hold is dropped, when somebody next comes.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._users: set[Using] = set()
        self._left: set[object] = set()  # calls that have not come to their ends
        self._changed = threading.Condition()  # of the two above
        self._thread: int | None = None
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy begins without a thread

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()

    # ------------------------------------------------------------------ calls

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the thread run a function after all that it has to do already; nobody waits for it."""
        call = object()

        def over() -> None:
            with self._changed:
                self._left.discard(call)
                self._changed.notify_all()

        def run() -> None:
            self._thread = threading.get_ident()
            try:
                function(*args)
            except BaseException:
                log.exception("a call that nobody waits for failed")
            finally:
                over()

        with self._changed:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specdec")
            self._left.add(call)
            try:
                self._pool.submit(run)
            except BaseException:  # no thread could be started; the call may run all the same, with the next one
                over()
                raise

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the thread and return what it returns.

        If this is cancelled the function still runs, to its end and before any later one.
        """
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        def run() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = function(*args)
            except BaseException as raised:
                error = storable(raised)
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(_answer, answer, result, error)
            error = None  # its traceback leads back to here

        self.post(run)
        return await answer

    # ------------------------------------------------------------------ users

    def using(self, current: Callable[[], Engine], drop: Callable[[], None]) -> Using:
        """Return a context whose value is `call`, for one asynchronous caller.

        Args:
            current: returns the engine that it uses.
            drop: drops what it has there; run in the thread, at the end of the context or of its event loop.
        """
        return Using(self, current, drop)

    def enter(self, user: Using) -> None:
        """Count a user, and take the engine from the thread that used it last.

        Raises:
            WrongThreadError: that thread is in the middle of something.
        """
        self._forget_parent()
        with self._changed:
            self._count_off_closed()
            if not self._users and not self._left:  # else the engine is the thread's already
                engine = user.current()
                if engine.has_unfinished:
                    raise WrongThreadError(
                        "a stream is still open, or a request that was added directly; finish or close it before "
                        "asynchronous use"
                    )
                engine.target.owner = None
            self._users.add(user)

    async def leave(self, user: Using) -> None:
        """Count a user off, and let go of the engine after the last."""
        with self._changed:
            is_left = user in self._users
            self._users.discard(user)
        if is_left and user.is_over:
            self.post(self._drop, user)
        elif is_left:
            await self.call(self._drop, user)

    @property
    def is_used(self) -> bool:
        """True while asynchronous callers are busy."""
        if self._pid != os.getpid():  # a forked process: the lock may be held for ever
            return False
        with self._changed:
            self._count_off_closed()
            return bool(self._users)

    def settle(self, engine: Engine) -> None:
        """Wait for what cancelled callers left to the thread, before the engine is used from another.

        Raises:
            WrongThreadError: asynchronous callers are still busy.
        """
        if self._forget_parent():
            engine.target.owner = None
        with self._changed:
            self._count_off_closed()
            if self._users:
                raise WrongThreadError(
                    "asynchronous calls or streams are open; await them or close them before using this directly"
                )
            if self._thread == threading.get_ident():
                raise WrongThreadError("a step is running; use this again when it is over, not inside of it")
            self._changed.wait_for(lambda: not self._left)
            if engine.target.owner == self._thread:
                engine.target.owner = None

    def _count_off_closed(self) -> None:
        for user in [u for u in self._users if u.loop is not None and u.loop.is_closed()]:
            self._users.discard(user)
            self.post(self._drop, user)

    def _drop(self, user: Using) -> None:
        try:
            user.drop()
        finally:
            if not self._users:
                user.current().target.disown()

    def _forget_parent(self) -> bool:
        """Begin anew in a forked process, in which no thread of its parent lives on; tell whether this is one."""
        is_forked = self._pid != os.getpid()
        if is_forked:
            self._begin()
        return is_forked


class Using:
    """The time in which an asynchronous caller is busy. No generator: those are closed in any order at a loop's end."""

    def __init__(self, worker: Worker, current: Callable[[], Engine], drop: Callable[[], None]) -> None:
        self._worker, self.current, self.drop = worker, current, drop
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_over = False  # set where nothing is left to be dropped: leaving then does not wait for the thread

    async def __aenter__(self) -> Callable[..., Any]:
        self.loop = asyncio.get_running_loop()
        self._worker.enter(self)
        return self._worker.call

    async def __aexit__(self, *error: object) -> None:
        await self._worker.leave(self)


def storable(error: BaseException) -> BaseException:
    """Return an exception as futures and generators take it: who waited for a StopIteration would wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{error!r} came out of a step")
    wrapped.__cause__ = error
    return wrapped


def _answer(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return  # whoever waited was cancelled
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
