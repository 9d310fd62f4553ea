"""specdec's log on standard error: a bar for what takes long, plain lines where there is no terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from specdec.cli.console import messages, plain, say

log = logging.getLogger("specdec")
_REFRESHES_PER_S = 2  # few: kernels may be timed meanwhile


class _Bar(BarColumn):
    """A bar where the number of steps is known, nothing elsewhere."""

    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return Text("") if task.total is None else super().render(task)


class LogView(logging.Handler):
    """Shows the log while a command runs. Warnings stay, information passes by in the line of what is being done."""

    def __init__(self) -> None:
        super().__init__()
        self._console = messages()
        self._progress: Progress | None = None
        self._doing, self._spins = "", False
        self._held: list[str] | None = None

    def __enter__(self) -> LogView:
        self._before = (log.level, log.propagate)
        log.addHandler(self)
        log.setLevel(logging.DEBUG)  # later steps of a long preparation come as DEBUG
        log.propagate = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        log.removeHandler(self)
        level, log.propagate = self._before
        log.setLevel(level)

    @property
    def console(self) -> Console:
        """Where a bar of somebody else's goes, so that the log is written above it."""
        return self._console

    def emit(self, record: logging.LogRecord) -> None:
        steps: tuple[int, int] | None = getattr(record, "progress", None)
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            if self._held is None:
                self._say(message)
            else:
                self._held.append(message)
        elif self._doing and (steps or record.levelno >= logging.INFO):
            if self._console.is_terminal and (steps or self._progress):
                self._show(message, steps)
            elif record.levelno >= logging.INFO:
                self._say(message)

    def _say(self, message: str) -> None:
        say(message, console=self._console)  # above a bar, which is on the same console

    def _show(self, message: str, steps: tuple[int, int] | None) -> None:
        done, total = steps or (0, None)
        text = plain(message)
        if done == total:
            if not self._spins:
                self._stop()
                return
            text, done, total = self._doing, 0, None
        progress = self._start()
        task = progress.tasks[0]
        task.total = total  # update() takes None for "as it was"
        progress.update(task.id, description=text, completed=done)

    @contextmanager
    def doing(self, what: str, spin: bool = True) -> Iterator[None]:
        """Say what the wait is for, and at the end how long it was.

        Args:
            what: being done.
            spin: on a terminal, in one line that is gone afterwards. Downloads draw bars of their own instead.
        """
        start = time.perf_counter()
        self._doing, self._spins = plain(what), spin and self._console.is_terminal
        try:
            if self._spins:
                self._start()
            else:
                self._say(f"{what} ...")
            yield
            self._stop()
            self._say(f"{what}: {time.perf_counter() - start:.1f} s")
        finally:
            self._stop()
            self._doing = ""

    def _start(self) -> Progress:
        if self._progress is None:
            column = Column(no_wrap=True, overflow="ellipsis")
            self._progress = Progress(
                SpinnerColumn("dots", style="dim"),
                _Bar(bar_width=20),
                TextColumn("{task.description}", style="dim", markup=False, table_column=column),
                console=self._console,
                refresh_per_second=_REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
            )
            self._progress.add_task(self._doing, total=None)
            self._progress.start()
        return self._progress

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep warnings until the block ends: text is being written meanwhile."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for message in held:
                self._say(message)
