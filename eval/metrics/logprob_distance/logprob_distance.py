"""How far distributions given as log-probabilities are apart, as a module of the library `evaluate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import datasets
import evaluate

from specdec.eval.metrics.columns import ignore_others
from specdec.eval.metrics.distance import logprob_distances

_NAMES = ("total_variation", "total_variation_max", "kl_divergence")


class LogprobDistance(evaluate.Metric):
    """Exact total variation and KL of next-token distributions, row by row. None without rows."""

    def _info(self) -> evaluate.MetricInfo:
        row = datasets.List(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description="Total variation and KL divergence of rows of log-probabilities.",
            citation="",
            inputs_description="predicted_logprobs, reference_logprobs: a row over the same tokens per position.",
            features=datasets.Features({"predicted_logprobs": row, "reference_logprobs": row}),
        )

    def _compute(self, *, predicted_logprobs: Any, reference_logprobs: Any, **others: Any) -> dict[str, Any]:
        ignore_others("logprob_distance", others)
        found = logprob_distances(predicted_logprobs, reference_logprobs)
        values = dict.fromkeys(_NAMES) if found is None else asdict(found)
        return {f"logprob_{name}": value for name, value in values.items()}
