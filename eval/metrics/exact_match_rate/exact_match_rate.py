"""The share of answers that are the reference's, as a module of the library `evaluate`."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from specdec.eval.metrics.agreement import agreements, exact_match_rate
from specdec.eval.metrics.columns import ignore_others


class ExactMatchRate(evaluate.Metric):
    """The share of answers whose token ids are the reference's, all of them, with an interval over answers."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.List(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description="Share of the answers that have the token ids of their references.",
            citation="",
            inputs_description="predictions, references: token ids of each answer; options level, eos_token_id.",
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(
        self, *, predictions: Any, references: Any, level: float = 0.95, eos_token_id: Any = None, **others: Any
    ) -> dict[str, Any]:
        ignore_others("exact_match_rate", others)
        return exact_match_rate(agreements(predictions, references, eos_token_id), level)
