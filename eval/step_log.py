"""A trace that keeps what each decode step of each request drafted, accepted and emitted."""

from __future__ import annotations

from typing import Any


class StepLog:
    """Keeps the steps of requests, in the order in which the requests were queued."""

    def __init__(self, other: Any | None) -> None:
        """`other`: a trace that goes on getting the same steps."""
        self._other = other
        self._steps: dict[int, list[list[int]]] = {}

    def record(self, event: Any) -> None:
        if self._other is not None:
            self._other.record(event)
        for work, verdict in zip(event.work, event.verdicts, strict=True):
            steps = self._steps.setdefault(work.request.request_id, [])
            if not work.is_prefill:
                steps.append([verdict.drafted, verdict.depth, verdict.num_accepted, len(verdict.tokens)])

    def steps(self) -> list[list[list[int]]]:
        """Return, per request, [drafted, depth, accepted, emitted] of its decode steps."""
        return [self._steps[request_id] for request_id in sorted(self._steps)]
