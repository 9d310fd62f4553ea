"""What the target forwards of a variant were made of, and what t(M) says they should have cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from specdec.eval.ratios import speedup
from specdec.eval.records import BASELINE, Machine, RequestRecord, Sample
from specdec.eval.report.gather import Point


@dataclass(frozen=True, slots=True)
class Forwards:
    """Those of one batch that decoded."""

    rows: list[int]  # of each: pending tokens and draft nodes of the requests that ran
    requests: list[int]  # that ran in each
    num_tokens: int  # that all of them gave
    draft_s: float  # mean of one
    verify_s: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Means over the forwards of a variant."""

    num_rows: float
    num_requests: float
    draft_s: float
    verify_s: float


def forwards(sample: Sample) -> Forwards | None:
    """Return the forwards of a batch; None of a peer, without a decode step, and where steps and emissions part.

    Requests that ran in one forward got their tokens at one time.
    """
    rows: Counter[float] = Counter()
    running: Counter[float] = Counter()
    for request in sample.requests:
        steps = _timed_steps(request)
        if steps is None:
            return None
        for at, drafted in steps:
            rows[at] += 1 + drafted
            running[at] += 1
    if not rows:
        return None
    longest = max(sample.requests, key=lambda request: len(request.steps or ()))  # it ran in the most forwards
    draft_s, verify_s = ((getattr(longest, name) or 0.0) / len(longest.steps or ()) for name in ("draft_s", "verify_s"))
    return Forwards(list(rows.values()), [running[at] for at in rows], sample.num_decode_tokens, draft_s, verify_s)


def _timed_steps(request: RequestRecord) -> list[tuple[float, int]] | None:
    """Return when each decode step gave its tokens, and what it drafted; None where the records do not tell."""
    if request.steps is None:
        return None
    later, giving = request.emissions[1:], [step for step in request.steps if step[3]]
    if [count for _, count in later] != [step[3] for step in giving]:
        return None  # a preempted request was prefilled again
    return [(at, step[0]) for (at, _), step in zip(later, giving, strict=True)]


def step_cost(samples: Sequence[Sample]) -> StepCost | None:
    """Return what a forward was made of; None for peers, whose steps are unknown, and without a decode step."""
    known = [own for own in map(forwards, samples) if own is not None]
    if not known:
        return None
    counts = [len(own.rows) for own in known]
    return StepCost(
        fmean(m for own in known for m in own.rows),
        fmean(n for own in known for n in own.requests),
        fmean((own.draft_s for own in known), counts),
        fmean((own.verify_s for own in known), counts),
    )


def forward_s(machine: Machine, num_rows: float) -> float | None:
    """Return t(M) between the measured M by straight lines; None outside of them."""
    times = sorted((row["rows"], row["runner_s"]) for row in machine.step_times)
    for (m0, t0), (m1, t1) in pairwise(times):
        if m0 <= num_rows <= m1:
            return t0 + (t1 - t0) * (num_rows - m0) / (m1 - m0)
    return times[0][1] if len(times) == 1 and times[0][0] == num_rows else None


def machine_of(point: Point, points: Sequence[Point]) -> Machine | None:
    """Return what the machine does: as this point measured it, else as one of the same model and machine did."""
    own = _what_it_measures(point)
    for other in (point, *points):
        if other.records.machine is not None and _what_it_measures(other) == own:
            return other.records.machine
    return None


def _what_it_measures(point: Point) -> tuple[object, ...]:
    header, origin = point.records.header, point.provenance
    return header.target, header.dtype, origin.get("cpu"), origin.get("gpu"), origin.get("num_threads")


def predicted_speedup(point: Point, variant: str, machine: Machine) -> float | None:
    """Return the median of time per token without drafts over that with them, both by t(M).

    Taken as that of measured speedups, over conversations, or batches of several prompts if they are full; but the
    time of a forward is t(its rows) and the drafter's. None where rows lie outside of t(M).
    """
    cases = point.records.header.cases
    units = {name: unit for unit, name in enumerate(dict.fromkeys(case.name for case in cases))}
    full = max(len(sample.requests) for sample in point.records.samples)
    plain = {(s.batch, s.repeat): _token_s(s, machine) for s in point.records.of(BASELINE)}
    pairs = []
    for sample in point.records.of(variant):
        key = sample.batch, sample.repeat
        if key in plain and len(sample.requests) == full and sample.num_decode_tokens:
            before, after = plain[key], _token_s(sample, machine)
            if before is None or after is None:
                return None
            unit = sample.batch if full > 1 else units[cases[sample.requests[0].case].name]
            pairs.append((unit, sample.batch, before, after))
    found = speedup(pairs)
    return None if found is None else found.median


def _token_s(sample: Sample, machine: Machine) -> float | None:
    """Return seconds per token of a batch, by t(M)."""
    own = forwards(sample)
    times = [forward_s(machine, m) for m in own.rows] if own is not None else []
    known = [at for at in times if at is not None]
    if own is None or len(known) < len(times):
        return None
    return (sum(known) + len(known) * own.draft_s) / own.num_tokens
