"""Ctrl-C that waits until the books are closed."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class _Held:
    """A handler of SIGINT that only notes it."""

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came, self.frame = True, frame


class uninterrupted:  # noqa: N801
    """A context in which Ctrl-C waits for the end of the context; named as contextlib names such.

    For a few statements that belong together and wait for nothing, such as taking a request out of one list and putting
    it into another. Where Ctrl-C cannot strike, in other threads than the main one, or inside of another such context,
    this does nothing.
    """

    def __enter__(self) -> None:
        self._held: _Held | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._earlier = signal.getsignal(signal.SIGINT)
        if not callable(self._earlier) or isinstance(self._earlier, _Held):
            return  # ignored, ending the process at once, or held already
        held = _Held()
        signal.signal(signal.SIGINT, held)
        self._held = held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        held = self._held
        if held is None:
            return
        signal.signal(signal.SIGINT, self._earlier)
        if held.came and callable(self._earlier):
            self._earlier(signal.SIGINT, held.frame)
