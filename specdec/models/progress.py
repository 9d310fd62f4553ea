"""How far a long preparation is, as log records: one line in a log, a bar where somebody draws one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TypeVar

log = logging.getLogger("specdec")

T = TypeVar("T")
_MOST_REPORTS = 50


def report(message: str, done: int, total: int) -> None:
    """Log that `done` of `total` steps are behind us: the beginning at INFO, what follows at DEBUG.

    The record carries `progress`, the pair (done, total), for a handler that draws a bar.
    """
    log.log(logging.DEBUG if done else logging.INFO, message, extra={"progress": (done, total)})


def reporting(message: str, steps: Sequence[T]) -> Iterator[T]:
    """Yield the steps and report before the first, after the last and now and then between."""
    total, shown = len(steps), 0
    report(message, 0, total)
    for done, step in enumerate(steps, start=1):
        yield step
        if done == total or (done - shown) * _MOST_REPORTS >= total:
            shown = done
            report(message, done, total)
