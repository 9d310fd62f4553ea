"""One timed run of a batch, for measurements that bring their own rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.eval.ratios import speedup
from specdec.stats import RequestStats


@dataclass(frozen=True, slots=True)
class BatchRun:
    """A run, and the number of its round: runs of one number are compared with each other."""

    number: int
    num_tokens: int  # that decoding gave
    decode_s: float  # of the whole run, all but prefill: some requests decode while others' prompts are computed

    @classmethod
    def of(cls, number: int, stats: Sequence[RequestStats]) -> BatchRun:
        """Return the run that these requests made together."""
        begin = min(own.emissions[0][0] - (own.ttft_s or 0.0) for own in stats)
        spent = max(own.emissions[-1][0] for own in stats) - begin - sum(own.prefill_s for own in stats)
        return cls(number, sum(own.num_emitted_tokens for own in stats), spent)


def over(baseline: Sequence[BatchRun], variant: Sequence[BatchRun]) -> dict[str, Any]:
    """Return how many times faster the variant's runs are than the baseline's at the same place, as JSON holds it."""
    pairs = []
    for a, b in zip(baseline, variant, strict=True):
        assert a.number == b.number, "runs are paired by their round"
        pairs.append((a.number, 0, a.decode_s / a.num_tokens, b.decode_s / b.num_tokens))
    found = speedup(pairs)
    assert found is not None, "at least one round was run"
    return asdict(found)
