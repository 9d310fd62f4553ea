"""Acceptance at each depth of the draft, as a module of the library `evaluate`."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from specdec.eval.metrics.columns import ignore_others
from specdec.eval.metrics.counters import stats_of
from specdec.stats import total


class AcceptancePerPosition(evaluate.Metric):
    """Acceptance at each depth of the draft, of all steps and of those that came so far.

    Lists, one entry per depth from 1 on; a conditional entry is None where no step came so far.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of the steps that accepted at each depth, unconditional and conditional.",
            citation="",
            inputs_description="steps: per request [[drafted, depth, accepted, emitted], ...]; option cut.",
            features=datasets.Features({"steps": datasets.List(datasets.List(datasets.Value("int64")))}),
        )

    def _compute(self, *, steps: Any, cut: Any = None, **others: Any) -> dict[str, Any]:
        ignore_others("acceptance_per_position", others)
        stats = total(stats_of(steps, cut))
        return {
            "acceptance_at_unconditional": stats.acceptance_at_unconditional,
            "acceptance_at_conditional": stats.acceptance_at_conditional,
        }
