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
    num_tokens: int
    decode_s: float  # from when all requests have a first token to the last token of all

    @classmethod
    def of(cls, number: int, stats: Sequence[RequestStats]) -> BatchRun:
        """Return the run that these requests made together."""
        emissions = [own.emissions for own in stats]
        spent = max(e[-1][0] for e in emissions) - max(e[0][0] for e in emissions)
        return cls(number, sum(count for e in emissions for _, count in e), spent)


def over(baseline: Sequence[BatchRun], variant: Sequence[BatchRun]) -> dict[str, Any]:
    """Return how many times faster the variant's runs are than the baseline's at the same place, as JSON holds it."""
    pairs = []
    for a, b in zip(baseline, variant, strict=True):
        assert a.number == b.number, "runs are paired by their round"
        pairs.append((a.number, a.decode_s / a.num_tokens, b.decode_s / b.num_tokens))
    found = speedup(pairs)
    assert found is not None, "at least one round was run"
    return asdict(found)
