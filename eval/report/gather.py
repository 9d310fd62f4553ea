"""Folders -> the measured points in them, what could not be used, and what a reader must be warned of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specdec.errors import InputError
from specdec.eval.records import (
    BASELINE,
    CONFIG,
    ERROR,
    PROVENANCE,
    RECORDS,
    Records,
    VariantInfo,
    read_records,
    without_halves,
)
from specdec.eval.report.differences import differences, origin_of
from specdec.eval.report.prompt_set import PromptSet, prompt_differences
from specdec.eval.summary import drafter_faults, summarise

# What figures of records that nobody foresaw may raise: such a point is listed, and the report goes on without it.
ODD = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_UNNAMED = "point"  # of a measurement that is no part of a sweep
_HEADER_SETTINGS = ("target", "dtype", "batch_size", "max_new_tokens", "temperature")


@dataclass(frozen=True, slots=True)
class Point:
    """One measured point: what its folder says, and the figures derived from it."""

    folder: Path
    run: str  # the folder that was named on the command line, as text
    label: str  # unique in the report
    records: Records
    summary: dict[str, Any]  # of `summarise`
    config: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        return self.records.end is not None

    @property
    def prompts(self) -> PromptSet:
        return PromptSet.of(self.records.header, self.config)

    @property
    def variants(self) -> list[VariantInfo]:
        """Those that have figures, in the order of the header."""
        return [info for info in self.records.header.variants if info.name in self.summary["variants"]]

    def speedup(self, variant: str, kind: str = "decode") -> dict[str, Any] | None:
        """Return the speedup over the undrafted engine: `median`, `low`, `high`."""
        for entry in self.summary["speedups"]:
            if entry["variant"] == variant and entry["over"] == BASELINE:
                found: dict[str, Any] | None = entry[kind]
                return None if found is None or found["median"] is None else found
        return None

    def setting(self, key: str) -> Any:
        """Return what a dotted key was set to: by the command line, the header or the configuration; else None."""
        header = self.records.header
        if key in header.overrides:
            return header.overrides[key]
        if key in _HEADER_SETTINGS:
            return getattr(header, key)
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


@dataclass(frozen=True, slots=True)
class Unused:
    """A folder that gave no figures, and why."""

    folder: Path
    reason: str


@dataclass(slots=True)
class Gathered:
    """Everything a report is made of."""

    points: list[Point] = field(default_factory=list)
    unused: list[Unused] = field(default_factory=list)
    not_drawn: list[str] = field(default_factory=list)  # figures over all points that failed, a sentence each

    @property
    def warnings(self) -> list[str]:
        """What the reader must know before the figures, a sentence each."""
        unfinished = [point.label for point in self.points if not point.is_finished]
        said = [f"Not finished, used as far as it goes: {listed(unfinished)}."] if unfinished else []
        said += [f"{p.label} is not complete: {p.records.doubt}." for p in self.points if p.records.doubt]
        if self.unused:
            said.append(f"Not used: {listed([text_of(entry.folder) for entry in self.unused])}.")
        others = [*differences([p.provenance for p in self.points]), *prompt_differences(self.points)]
        said += [f"The points differ in {what}." for what in others]
        shaky = [p.label for p in self.points if (p.summary.get("control") or {}).get("holds") is False]
        if shaky:
            said.append(f"The control differs from the baseline, so noise or order is in the figures: {listed(shaky)}.")
        for p in self.points:
            for info in p.variants:
                faults = drafter_faults(p.summary["variants"][info.name])
                said += [f"{p.label}, {info.name}: {fault}." for fault in faults]
        return said + self.not_drawn

    def drop(self, point: Point, reason: str) -> None:
        """Move a point to those that are not used.

        Raises:
            InputError: it was the last.
        """
        self.points.remove(point)
        self.unused.append(Unused(point.folder, reason))
        self.check()

    def check(self) -> None:
        """Raise InputError unless there is a point."""
        if not self.points:
            reasons = "; ".join(f"{text_of(entry.folder)}: {entry.reason}" for entry in self.unused)
            raise InputError(f"there is nothing to report: {reasons}")


def gather(runs: Sequence[Path]) -> Gathered:
    """Return what the folders hold, at any depth, each folder once.

    Raises:
        InputError: a run is no folder, or there is no usable point in any of them.
    """
    found, seen = Gathered(), set()
    for run in runs:
        if not run.is_dir():
            raise InputError(f"run {str(run)!r} is no folder; name the folders of points or sweeps")
        folders = list(_folders(run))
        if not folders:
            found.unused.append(Unused(run, f"no {RECORDS} in it or below"))
        for folder in folders:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                _add(found, folder, run)
    found.check()
    _tell_trees(found.points)
    return found


def _tell_trees(points: Sequence[Point]) -> None:
    """Call a drafter's drafts trees in all points if they were trees in one: its rates then stay in one column."""
    own = [(info.drafter or info.name, p.summary["variants"][info.name]) for p in points for info in p.variants]
    trees = {drafter for drafter, figures in own if figures["tree"]}
    for drafter, figures in own:
        figures["tree"] = drafter in trees


def _folders(run: Path) -> Iterator[Path]:
    """Yield the folders that a measurement left, those of one number in the order of that number."""
    folders = {path.parent for name in (RECORDS, ERROR) for path in run.rglob(name)}
    yield from sorted(folders, key=lambda folder: [_natural(part) for part in folder.parts])


def _natural(name: str) -> list[tuple[int, int, str]]:
    pieces: list[str] = []
    for letter in name:
        if pieces and pieces[-1][-1].isdecimal() == letter.isdecimal():
            pieces[-1] += letter
        else:
            pieces.append(letter)
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in pieces]


def _add(found: Gathered, folder: Path, run: Path) -> None:
    try:
        records = read_records(folder / RECORDS) if (folder / RECORDS).exists() else None
        if (records is None or records.end is None) and (folder / ERROR).exists():
            raise InputError(f"failed: {_failure(folder / ERROR)}")
        assert records is not None, "a folder is listed for its records or its error"
        if not records.samples:
            raise InputError("nothing was measured before it ended")
        summary = _summary(records)
    except InputError as error:
        found.unused.append(Unused(folder, str(error)))
        return
    label = records.header.name
    if label == _UNNAMED:
        label = text_of(Path(folder.resolve().name)) or label
    if any(label == point.label for point in found.points):
        label = f"{label} ({text_of(folder)})"
    config, origin = _mapping(folder / CONFIG), origin_of(_mapping(folder / PROVENANCE))
    found.points.append(Point(folder, text_of(run), label, records, summary, config, origin))


def _summary(records: Records) -> dict[str, Any]:
    try:
        return summarise(records)
    except ODD as error:
        raise InputError(f"its records do not fit together: {type(error).__name__}: {error}") from error


def _failure(path: Path) -> str:
    failed = _mapping(path)
    return f"{failed.get('error', 'error')}: {failed.get('message', 'no message')}"


def _mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file; empty where there is none, since the figures do not need it."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        return {}
    return without_halves(value) if isinstance(value, dict) else {}


def text_of(path: Path) -> str:
    """Return a path as text that can be written, whatever bytes it has."""
    return os.fsencode(path).decode("utf-8", "replace")


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names in a row; they may hold commas."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + rest
