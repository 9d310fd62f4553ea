"""What is kept of every emitted token beside its id: logits, scores, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What to keep of each emitted token. A row of logits or scores is V float32 numbers per token.

    `logprobs`: None = no log-probabilities; n = those of the emitted token and of the n likeliest ones.
    """

    logits: bool = False
    scores: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        n = self.logprobs
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
            raise ConfigError(f"logprobs={n!r}; allowed: None, or an integer >= 0, the number of likeliest tokens")

    def __bool__(self) -> bool:
        return self.logits or self.scores or self.logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One emitted token. All on the CPU.

    `raw_logprob` is the log-softmax of the target's logits, `logprob` that of the scores: the logits after
    processors, temperature and filters, which is what transformers' `compute_transition_scores` normalises.
    """

    token_id: int
    logits: Tensor | None = None  # [V] float32, as the model gave them
    scores: Tensor | None = None  # [V] float32, after processors, temperature and filters
    raw_logprob: float | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token, raw_logprob), best first


def record_tokens(keep: Keep, token_ids: Sequence[int], logits: Tensor, scores: Tensor) -> list[TokenRecord]:
    """Return one record per emitted token.

    Args:
        keep: what is wanted.
        token_ids: e emitted tokens.
        logits: [e, V] float32, the target's rows they were chosen from.
        scores: [e, V] float32, the same rows after processors, temperature and filters.
    """
    records: list[dict[str, Any]] = [{"token_id": token} for token in token_ids]
    logits, scores = logits.cpu(), scores.cpu()
    if keep.logits:
        for record, row in zip(records, logits.clone(), strict=True):
            record["logits"] = row
    if keep.scores:
        for record, row in zip(records, scores.clone(), strict=True):
            record["scores"] = row
    if keep.logprobs is not None:
        raw, processed = logits.log_softmax(dim=-1), scores.log_softmax(dim=-1)
        values, ids = raw.topk(min(keep.logprobs, raw.shape[-1]), dim=-1)
        for i, record in enumerate(records):
            record["raw_logprob"] = float(raw[i, record["token_id"]])
            record["logprob"] = float(processed[i, record["token_id"]])
            record["top"] = tuple(zip(ids[i].tolist(), values[i].tolist(), strict=True))
    return [TokenRecord(**record) for record in records]
