"""How far two sets of sampled token sequences are apart, as a module of the library `evaluate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import datasets
import evaluate

from specdec.errors import ConfigError
from specdec.eval.metrics.columns import ignore_others, until_eos
from specdec.eval.metrics.distance import sample_distances

_NAMES = ("total_variation", "total_variation_null", "p_value", "kl_divergence", "kl_divergence_null")


class SampleDistance(evaluate.Metric):
    """Total variation and KL of two sets of sampled token sequences per prompt, with what chance alone gives.

    All are estimates; see `sample_distances` for how. None without prompts.
    """

    def _info(self) -> evaluate.MetricInfo:
        samples = datasets.List(datasets.List(datasets.Value("int64")))
        return evaluate.MetricInfo(
            description="Total variation and KL divergence of two sets of sampled token sequences.",
            citation="",
            inputs_description="predicted_samples, reference_samples: per prompt [[token ids], ...]; options "
            "num_tokens (of each sample that count), eos_token_id.",
            features=datasets.Features({"predicted_samples": samples, "reference_samples": samples}),
        )

    def _compute(
        self,
        *,
        predicted_samples: Any,
        reference_samples: Any,
        num_tokens: int | None = None,
        eos_token_id: Any = None,
        **others: Any,
    ) -> dict[str, Any]:
        ignore_others("sample_distance", others)
        if num_tokens is not None and (not isinstance(num_tokens, int) or num_tokens < 1):
            raise ConfigError(f"num_tokens={num_tokens!r}; allowed: an integer >= 1, or None for whole samples")
        ours, theirs = (
            [[until_eos(sample, eos_token_id)[:num_tokens] for sample in samples] for samples in column]
            for column in (predicted_samples, reference_samples)
        )
        found = sample_distances(ours, theirs)
        values = dict.fromkeys(_NAMES) if found is None else asdict(found)
        return {f"sample_{name}": value for name, value in values.items()}
