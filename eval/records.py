"""What a measured point leaves behind: its folder, and the lines of its records.jsonl; see docs/records.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import InputError
from specdec.eval.atomic import writing
from specdec.eval.record_checks import check_dropped, check_header, check_machine, check_sample, check_types
from specdec.stats import RequestStats

FORMAT = 1  # of records.jsonl; raised when a field changes its meaning or goes
CONFIG, PROVENANCE, RECORDS, SUMMARY, ERROR = (
    *("config.yaml", "provenance.json", "records.jsonl", "summary.json", "error.json"),
)
BASELINE, CONTROL = "none", "control"  # the undrafted engine, and the same a second time

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class VariantInfo:
    """One of the ways to generate that a point compares."""

    name: str  # unique in the point
    kind: str  # "engine" or "peer"
    drafter: str | None = None  # None for peers
    verifier: str | None = None
    lossless: bool = True
    max_draft_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of drafter, verifier and engine, that differ
    note: str = ""  # what a reader of the figures must know, such as other weights


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, the same for every variant."""

    name: str  # of the conversation
    category: str
    turn: int  # from 0
    num_prompt_tokens: int
    num_new_tokens: int | None = None  # of the undrafted answer, which peers are asked for; None: nobody had to know
    digest: str = ""  # of the prompt's token ids: two prompts of one length are told apart


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row of the prompt set that was not run, and why."""

    name: str
    category: str
    reason: str
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What was compared. The first line of a file."""

    name: str  # of the point, unique in a sweep
    target: str
    dtype: str
    num_parameters: int
    kv_bytes_per_token: int
    batch_size: int
    max_new_tokens: int
    temperature: float
    seed: int | None
    repeats: int
    variants: list[VariantInfo]
    cases: list[Case]
    absent: list[dict[str, str]] = field(default_factory=list)  # {"name", "reason"}: peers that are not installed
    left_out: list[LeftOut] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)  # dotted key -> value: what the command line said
    question: str | None = None  # of the experiment
    sources: dict[str, str] = field(default_factory=dict)  # file or folder that a setting names -> digest of it
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine does, measured in the same run."""

    step_times: list[dict[str, float]]  # {"rows", "runner_s", perhaps "transformers_s"}: one forward after 128 tokens
    read_bandwidth_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    weight_bytes_per_step: int | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One answer. Times in seconds since its batch was handed in."""

    case: int  # index into the header's
    token_ids: list[int]
    finish_reason: str
    emissions: list[list[float]]  # [time, tokens] of each step that gave some, prefill's first
    steps: list[list[int]] | None = None  # [drafted, depth, accepted, emitted] of each decode step; None: a peer
    prefill_s: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    other_s: float | None = None
    cut: int | None = None  # tokens before it begins to repeat itself; None if it never does
    num_drafter_errors: int = 0  # exceptions of the drafter, after which it went on without drafts
    num_rejected_drafts: int = 0  # steps whose drafts were invalid and dropped
    num_missed_drafts: int = 0  # steps without drafts because the drafter had no KV memory left

    @property
    def ttft_s(self) -> float:
        return self.emissions[0][0]

    @property
    def itl_s(self) -> list[float]:
        """Gaps between emissions."""
        return [b[0] - a[0] for a, b in zip(self.emissions, self.emissions[1:], strict=False)]

    def stats(self, num_tokens: int | None = None) -> RequestStats:
        """Return the counters of the first `num_tokens` tokens, as if a stop had ended the answer there.

        The step in which that falls counts as one step and with its tokens before it. Times are the whole answer's.
        """
        stats = RequestStats()
        at = len(self.token_ids) - sum(emitted for *_, emitted in self.steps or [])  # prefill's token
        for drafted, depth, accepted, emitted in self.steps or []:
            left = emitted if num_tokens is None else min(emitted, num_tokens - at)
            if left <= 0:
                break
            stats.record_decode(drafted=drafted, depth=depth, accepted=min(accepted, left), emitted=left)
            at += emitted
        stats.prefill_s, stats.draft_s = self.prefill_s or 0.0, self.draft_s or 0.0
        stats.verify_s, stats.other_s = self.verify_s or 0.0, self.other_s or 0.0
        return stats


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one variant on one batch of cases."""

    variant: str
    batch: int  # number of the batch; its cases are those of `requests`
    repeat: int
    place: int  # in the rotation: 0 ran first of this batch's variants
    start_s: float  # after the point began
    requests: list[RequestRecord]

    @property
    def total_s(self) -> float:
        """From when the batch was handed in to its last token."""
        return max(r.emissions[-1][0] for r in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)

    @property
    def decode_s(self) -> float:
        """The time that decoding took.

        Alone: from the first token to the last. In a batch whose engine splits its steps: all but the prompts' share of
        the rows, since some requests decode while others' prompts are computed. Of a peer's batch: from when all have
        their first token.
        """
        if self._is_split:
            return self.total_s - sum(r.prefill_s or 0.0 for r in self.requests)
        return self.total_s - max(r.ttft_s for r in self.requests)

    @property
    def num_decode_tokens(self) -> int:
        """Return how many tokens came in that time.

        All but the first emission of each request, which is one token in this engine and may be more in a peer that
        drafts before its first forward. Of a peer's batch: what was emitted after all had their first token.
        """
        if self._is_split:
            return sum(len(r.token_ids) - int(r.emissions[0][1]) for r in self.requests)
        start = max(r.ttft_s for r in self.requests)
        return sum(int(count) for r in self.requests for at, count in r.emissions if at > start)

    @property
    def _is_split(self) -> bool:
        """Whether it is a batch whose steps are known to be of prefill or of decoding, by the row."""
        return len(self.requests) > 1 and all(r.prefill_s is not None for r in self.requests)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A peer that failed while it ran; from there on the point went on without it."""

    variant: str
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a point that was measured to its end."""

    num_samples: int
    wall_s: float  # of the timed part, all sessions; answers that were given again after a kill are not in it
    outside_s: float  # of it, not in a variant: the runner and its records
    setup_s: float = 0.0  # not timed, last session: prompts, engines, warm-up, the machine, answers given again


@dataclass(slots=True)
class Records:
    """What a records.jsonl holds."""

    header: Header
    machine: Machine | None = None
    samples: list[Sample] = field(default_factory=list)
    end: End | None = None
    doubt: str | None = None  # why an end that was written does not count
    dropped: list[Dropped] = field(default_factory=list)  # peers that gave up, with reasons

    def of(self, variant: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.variant == variant]

    @property
    def gave_up(self) -> list[VariantInfo]:
        """The peers that were dropped."""
        names = {dropped.variant for dropped in self.dropped}
        return [info for info in self.header.variants if info.name in names]


class RecordWriter:
    """Appends lines to a records.jsonl, each written whole and flushed before the next sample begins.

    Raises:
        SpecdecError: they cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        with writing(self._folder):
            self._file = path.open("a", encoding="utf-8")

    def write(self, line: Header | Machine | Sample | Dropped | End) -> None:
        told = asdict(line) if isinstance(line, Header) else _compact(asdict(line))
        entry = {"type": type(line).__name__.lower(), **told}
        with writing(self._folder):
            self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._folder):
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _compact(value: Any) -> Any:
    """Return measured values with no more digits than a clock has."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _compact(part) for key, part in value.items()}
    return [_compact(part) for part in value] if isinstance(value, list) else value


def read_records(path: Path) -> Records:
    """Return what a records.jsonl holds; an unfinished last line, left by a killed run, is not part of it.

    An end that does not stand last, or counts other samples than are there, is none: `Records.doubt` says so.

    Raises:
        InputError: it cannot be read, is of another format, or a line before the last is broken.
    """
    found: Records | None = None
    known: set[tuple[str, int, int]] = set()
    for number, entry in _lines(path):
        try:
            kind = entry.pop("type")
            if kind == "header" and found is None:
                found = Records(_header(entry))
            elif found is None:
                raise ValueError("no header before it")
            else:
                _add(found, kind, entry, known)
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise InputError(f"{path}, line {number} is corrupt: {error}") from error
    if found is None:
        raise InputError(f"{path} has no header: nothing was measured there")
    if found.end is not None and found.end.num_samples != len(found.samples):
        found.doubt = f"its end counts {found.end.num_samples} samples, {len(found.samples)} are there"
        found.end = None
    return found


def _add(found: Records, kind: Any, entry: dict[str, Any], known: set[tuple[str, int, int]]) -> None:
    """Add what a line after the header says; `known` are the samples before it."""
    if kind == "machine" and found.machine is None:
        found.machine = _build(Machine, entry)
        check_machine(found.machine)
    elif kind == "sample":
        requests = [_build(RequestRecord, own) for own in entry.pop("requests")]
        sample = _build(Sample, {**entry, "requests": requests})
        check_sample(found.header, sample, known)
        known.add((sample.variant, sample.batch, sample.repeat))
        found.samples.append(sample)
        found.end = None
    elif kind == "dropped":
        dropped = _build(Dropped, entry)
        check_dropped(found.header, dropped, [earlier.variant for earlier in found.dropped])
        found.dropped.append(dropped)
        found.end = None
    elif kind == "end":
        found.end = _build(End, entry)
    else:
        raise ValueError(f"a second {kind}" if kind in ("header", "machine") else f"unknown type {kind!r}")


def whole_bytes(path: Path) -> int:
    """Return the length of a records.jsonl without an unfinished last line."""
    data = path.read_bytes()
    return len(data) if data.endswith(b"\n") else data.rfind(b"\n") + 1


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_bytes()[: whole_bytes(path)].decode("utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            entry = json.loads(line)
            entry = without_halves(entry) if "\\ud" in line.lower() else entry
        except (RecursionError, ValueError) as error:
            raise InputError(f"{path}, line {number} is corrupt: {error}") from error
        if not isinstance(entry, dict):
            raise InputError(f"{path}, line {number} is corrupt: not an object")
        yield number, entry


def without_halves(value: Any) -> Any:
    """Return a value of JSON whose texts can be written, `?` in place of halves of surrogate pairs."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {without_halves(key): without_halves(part) for key, part in value.items()}
    return [without_halves(part) for part in value] if isinstance(value, list) else value


def _header(entry: dict[str, Any]) -> Header:
    if entry.get("format") != FORMAT:
        raise ValueError(f"format {entry.get('format')!r}; this release reads {FORMAT}")
    parts = {"variants": VariantInfo, "cases": Case, "left_out": LeftOut}
    header = _build(Header, entry | {name: [_build(kind, own) for own in entry[name]] for name, kind in parts.items()})
    check_header(header)
    return header


def _build(kind: type[_T], entry: dict[str, Any]) -> _T:
    check_types(kind, entry)
    return kind(**entry)
