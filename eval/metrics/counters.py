"""From the steps of requests to their counters: all rates are those of `RequestStats`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from specdec.errors import InputError
from specdec.eval.records import RequestRecord
from specdec.stats import RequestStats

Steps = Sequence[Sequence[int]]  # [[drafted, depth, accepted, emitted], ...]


def stats_of(steps: Sequence[Steps], cut: Sequence[int | None] | None = None) -> list[RequestStats]:
    """Return one request's counters per entry.

    Args:
        steps: of each request, its decode steps, as in records.jsonl.
        cut: of each request, how many of its tokens count, prefill's first; None counts all.

    Raises:
        InputError: a step is impossible, or there are not as many cuts as requests.
    """
    if cut is not None and len(cut) != len(steps):
        raise InputError(f"cut has {len(cut)} entries for {len(steps)} requests; give one each, None for the whole")
    return [_counted(request, own, None if cut is None else cut[request]) for request, own in enumerate(steps)]


def _counted(request: int, steps: Steps, cut: int | None) -> RequestStats:
    for number, step in enumerate(steps):
        reason = _impossible(step)
        if reason is not None:
            raise InputError(
                f"request {request}, step {number}: {list(step)} is no [drafted, depth, accepted, emitted]: {reason}"
            )
    if cut is not None and (isinstance(cut, bool) or not isinstance(cut, int) or cut < 0):
        raise InputError(f"request {request}: cut={cut!r}; allowed: a number of tokens, or None for the whole")
    tokens = [0] * (1 + sum(step[3] for step in steps))  # which they are decides nothing; the first is prefill's
    plain = [[int(count) for count in step] for step in steps]
    return RequestRecord(case=request, token_ids=tokens, finish_reason="", emissions=[], steps=plain).stats(cut)


def _impossible(step: Sequence[int]) -> str | None:
    if len(step) != 4 or any(count is None or count < 0 for count in step):
        return "it needs four counts"
    drafted, depth, accepted, emitted = step
    if not accepted <= depth <= drafted:
        return "no more can be accepted than the depth, and that is at most what was drafted"
    if emitted not in (accepted, accepted + 1) or emitted == 0:
        return "a step emits what it accepted and one token more, or exactly that where the answer ends in it"
    return None


def macro(values: Iterable[float | None]) -> float | None:
    """Return the mean over the requests that have a value, or None."""
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None
