"""Accepted over drafted tokens, as a module of the library `evaluate`."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from specdec.eval.metrics.columns import ignore_others, with_interval
from specdec.eval.metrics.counters import macro, stats_of
from specdec.stats import total


class AcceptanceRate(evaluate.Metric):
    """Accepted over drafted tokens of all requests, with an interval over requests.

    None if nothing was drafted. A tree's counts nodes and is not comparable with a chain's.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Accepted over drafted tokens.",
            citation="",
            inputs_description="steps: per request [[drafted, depth, accepted, emitted], ...]; options level, cut.",
            features=datasets.Features({"steps": datasets.List(datasets.List(datasets.Value("int64")))}),
        )

    def _compute(self, *, steps: Any, level: float = 0.95, cut: Any = None, **others: Any) -> dict[str, Any]:
        ignore_others("acceptance_rate", others)
        stats = stats_of(steps, cut)
        pairs = [(s.num_accepted_tokens, s.num_draft_tokens) for s in stats]
        found = with_interval("acceptance_rate", total(stats).acceptance_rate, pairs, level)
        return {**found, "acceptance_rate_macro": macro(s.acceptance_rate for s in stats)}
