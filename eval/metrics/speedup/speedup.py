"""How many times faster a variant is than a baseline, as a module of the library `evaluate`."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from specdec.errors import InputError
from specdec.eval.metrics.columns import check_level, ignore_others
from specdec.eval.ratios import speedup


class Speedup(evaluate.Metric):
    """Baseline over variant time per token: the median over prompts of each one's median over its repeats.

    A row is one repeat of one prompt. Which time it is (decode, end to end) is the caller's to say. None without rows;
    the ends of the interval are None with few prompts.
    """

    def _info(self) -> evaluate.MetricInfo:
        seconds, count = datasets.Value("float64"), datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Baseline time over variant time per token, with an interval over prompts.",
            citation="",
            inputs_description="prompts: which one a row is of; baseline_s, variant_s: times; *_tokens; option level.",
            features=datasets.Features(
                {
                    "prompts": count,
                    "baseline_s": seconds,
                    "baseline_tokens": count,
                    "variant_s": seconds,
                    "variant_tokens": count,
                }
            ),
        )

    def _compute(
        self,
        *,
        prompts: Any,
        baseline_s: Any,
        baseline_tokens: Any,
        variant_s: Any,
        variant_tokens: Any,
        level: float = 0.95,
        **others: Any,
    ) -> dict[str, Any]:
        ignore_others("speedup", others)
        level = check_level(level)
        if not prompts:
            return {"speedup": None, "speedup_low": None, "speedup_high": None, "speedup_per_prompt": []}
        theirs = _seconds_per_token(baseline_s, baseline_tokens, "baseline")
        ours = _seconds_per_token(variant_s, variant_tokens, "variant")
        found = speedup([(p, 0, a, b) for p, a, b in zip(prompts, theirs, ours, strict=True)], level)
        assert found is not None, "there are rows"
        return {
            "speedup": found.median,
            "speedup_low": found.low,
            "speedup_high": found.high,
            "speedup_per_prompt": [found.per_unit[prompt] for prompt in dict.fromkeys(prompts)],
        }


def _seconds_per_token(times: list[float], tokens: list[int], name: str) -> list[float]:
    for row, (time_s, count) in enumerate(zip(times, tokens, strict=True)):
        if not time_s > 0 or count < 1:
            raise InputError(f"row {row}: {name} made {count} tokens in {time_s} s; allowed: at least 1, above 0")
    return [time_s / count for time_s, count in zip(times, tokens, strict=True)]
