"""Traces read back: the file that SPECDEC_TRACE named, as runs of steps; see docs/debug.md for the fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.errors import InputError
from specdec.trace import FORMAT


@dataclass(slots=True)
class TracedRun:
    """One engine's steps. `header` says what it was built from."""

    header: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)

    def of(self, request_id: int) -> Iterator[dict[str, Any]]:
        """Yield what the steps say about one request, in order."""
        for step in self.steps:
            yield from (entry for entry in step["requests"] if entry["request_id"] == request_id)

    @property
    def request_ids(self) -> list[int]:
        return sorted({entry["request_id"] for step in self.steps for entry in step["requests"]})


@dataclass(slots=True)
class TraceContents:
    """All runs of a file in the order they began, and which lines (from 1) were not whole: a disk was full."""

    runs: list[TracedRun]
    broken_lines: list[int]

    @property
    def num_broken_lines(self) -> int:
        return len(self.broken_lines)


def read_trace(path: str | Path) -> TraceContents:
    """Return what a trace file holds.

    Raises:
        InputError: it cannot be read, or was written in another format.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError) as error:  # ValueError: a path with a zero character
        raise InputError(f"the trace {str(path)!r} cannot be read: {error}") from error
    runs: dict[str, TracedRun] = {}
    broken: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        entry = _parse(line)
        kind, run = entry.get("type"), str(entry.get("run"))
        if kind == "header":
            if entry.get("format") != FORMAT:
                raise InputError(f"{str(path)!r} has trace format {entry.get('format')!r}; this release reads {FORMAT}")
            runs[run] = TracedRun(entry)
        elif kind == "step" and run in runs and _has_requests(entry):
            runs[run].steps.append(entry)
        else:
            broken.append(number)
    return TraceContents(list(runs.values()), broken)


def _has_requests(step: dict[str, Any]) -> bool:
    """Whether a step says which requests ran in it."""
    requests = step.get("requests")
    return isinstance(requests, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("request_id"), int) for entry in requests
    )


def _parse(line: str) -> dict[str, Any]:
    """Return a line's object; an empty one if it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}
