"""Where answers leave the reference, as a module of the library `evaluate`."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from specdec.eval.metrics.agreement import agreements, leading_share, median_divergence
from specdec.eval.metrics.columns import ignore_others, with_interval


class FirstDivergence(evaluate.Metric):
    """Where answers leave the reference: each, the median of those that do, and the share of equal leading tokens.

    An answer that ends before the other parts where it ends.
    """

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.List(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description="First token at which an answer is not its reference's.",
            citation="",
            inputs_description="predictions, references: token ids of each answer; options level, eos_token_id.",
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(
        self, *, predictions: Any, references: Any, level: float = 0.95, eos_token_id: Any = None, **others: Any
    ) -> dict[str, Any]:
        ignore_others("first_divergence", others)
        found = agreements(predictions, references, eos_token_id)
        pairs = [(a.leading, a.longer) for a in found]
        return {
            "first_divergence": [a.parted_at for a in found],
            "first_divergence_median": median_divergence(found),
            "num_diverged": sum(a.parted_at is not None for a in found),
            **with_interval("leading_share", leading_share(found), pairs, level),
        }
