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
    """All runs of a file in the order they began, and how many lines were not whole: a disk was full."""

    runs: list[TracedRun]
    num_broken_lines: int


def read_trace(path: str | Path) -> TraceContents:
    """Return what a trace file holds.

    Raises:
        InputError: it cannot be read, or was written in another format.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"the trace {str(path)!r} cannot be read: {error}") from error
    runs: dict[str, TracedRun] = {}
    num_broken = 0
    for line in filter(None, lines):
        entry = _parse(line)
        kind, run = entry.get("type"), entry.get("run")
        if kind == "header":
            if entry.get("format") != FORMAT:
                raise InputError(f"{str(path)!r} has trace format {entry.get('format')!r}; this release reads {FORMAT}")
            runs[str(run)] = TracedRun(entry)
        elif kind == "step" and run in runs:
            runs[run].steps.append(entry)
        else:
            num_broken += 1
    return TraceContents(list(runs.values()), num_broken)


def _parse(line: str) -> dict[str, Any]:
    """Return a line's object; an empty one if it is none."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
