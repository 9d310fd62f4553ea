"""How likely answers are under the target: it scores them after their prompts, in batches, through its own forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.eval.ratios import micro_interval

_LOGITS = 2**27  # elements of one forward's logits: 0.5 GiB in float32


@dataclass(frozen=True, slots=True)
class Score:
    """One answer under the target."""

    nll: float  # sum over its tokens of minus the log-probability, in nats
    num_tokens: int


def score(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Score]:
    """Return the scores of answers, their EOS included, given their prompts.

    It is the model's own distribution that counts: temperature 1, no logits processors. Rows are padded behind their
    ends, where a causal model cannot see it, and grouped by length.

    Args:
        model: a transformers causal LM, unmodified.
        prompts: token ids, at least one each.
        answers: token ids, perhaps none.
    """
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    found: dict[int, Score] = {}
    while by_length:
        width = len(rows[by_length[0]])
        size = max(1, _LOGITS // (width * model.get_output_embeddings().weight.shape[0]))
        batch, by_length = by_length[:size], by_length[size:]
        logits = _logits(model, [rows[i] for i in batch])
        for i, row in zip(batch, logits, strict=True):
            begin, end = len(prompts[i]), len(rows[i])
            targets = torch.tensor(rows[i][begin:end], dtype=torch.int64, device=row.device)
            at = row[begin - 1 : end - 1].to(torch.promote_types(row.dtype, torch.float32))
            nll = torch.nn.functional.cross_entropy(at, targets, reduction="sum")
            found[i] = Score(float(nll), end - begin)
    return [found[i] for i in range(len(rows))]


@torch.inference_mode()
def _logits(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return logits [B, W, V] of rows of token ids, the first the longest."""
    width = len(rows[0])
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits


def perplexity(scores: Sequence[Score]) -> dict[str, Any]:
    """Return exp of the mean negative log-likelihood per token (micro), with its 95 % interval over answers.

    All None without tokens; the interval is None of few answers.
    """
    pairs = [(s.nll, float(s.num_tokens)) for s in scores if s.num_tokens]
    if not pairs:
        return {"perplexity": None, "perplexity_interval": None}
    mean = sum(nll for nll, _ in pairs) / sum(count for _, count in pairs)
    found = micro_interval(pairs)
    interval = None if found is None else [math.exp(end) for end in found]
    return {"perplexity": math.exp(mean), "perplexity_interval": interval}
