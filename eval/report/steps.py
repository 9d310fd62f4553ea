"""What one target forward of a variant was made of, and what t(M) says it should have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specdec.eval.records import BASELINE, Machine, Sample
from specdec.eval.report.gather import Point


@dataclass(frozen=True, slots=True)
class StepCost:
    """Means over the decode forwards of a variant."""

    num_rows: float  # of all requests of the batch: pending tokens and draft nodes
    draft_s: float
    verify_s: float


def step_cost(samples: Sequence[Sample]) -> StepCost | None:
    """Return what a forward was made of; None for peers, whose steps are unknown, and without a decode step.

    Requests of a batch decode together, each step from the first on: a batch has as many forwards as its longest
    request has steps.
    """
    requests = [request for sample in samples for request in sample.requests if request.steps is not None]
    num_steps = sum(len(r.steps or ()) for r in requests)
    num_forwards = sum(max(len(r.steps or ()) for r in sample.requests) for sample in samples)
    if not num_steps or not num_forwards:
        return None
    num_rows = sum(1 + drafted for r in requests for drafted, *_ in r.steps or ())
    draft_s, verify_s = (sum(getattr(r, name) or 0.0 for r in requests) / num_steps for name in ("draft_s", "verify_s"))
    return StepCost(num_rows / num_forwards, draft_s, verify_s)


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
    """Return acceptance length * t(rows of a plain step) / (t(rows of a drafting step) + draft time per step)."""
    plain, drafting = (step_cost(point.records.of(name)) for name in (BASELINE, variant))
    length = point.summary["variants"][variant]["acceptance_length"]
    if plain is None or drafting is None or length is None:
        return None
    before, after = forward_s(machine, plain.num_rows), forward_s(machine, drafting.num_rows)
    return None if before is None or after is None else length * before / (after + drafting.draft_s)
