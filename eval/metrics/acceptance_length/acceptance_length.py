"""Tokens per target decode forward, as a module of the library `evaluate`."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from specdec.eval.metrics.columns import ignore_others, with_interval
from specdec.eval.metrics.counters import macro, stats_of
from specdec.stats import total


class AcceptanceLength(evaluate.Metric):
    """Tokens per target decode forward, the next token included, with an interval over requests.

    Steps without drafts count too; the token that prefill yields does not. None without a decode step.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Tokens per target decode forward, the next token included.",
            citation="",
            inputs_description="steps: per request [[drafted, depth, accepted, emitted], ...]; options level, cut.",
            features=datasets.Features({"steps": datasets.List(datasets.List(datasets.Value("int64")))}),
        )

    def _compute(self, *, steps: Any, level: float = 0.95, cut: Any = None, **others: Any) -> dict[str, Any]:
        ignore_others("acceptance_length", others)
        stats = stats_of(steps, cut)
        pairs = [(s.num_emitted_tokens, s.num_steps) for s in stats]
        found = with_interval("acceptance_length", total(stats).acceptance_length, pairs, level)
        return {**found, "acceptance_length_macro": macro(s.acceptance_length for s in stats)}
