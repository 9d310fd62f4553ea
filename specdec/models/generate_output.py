"""What generate() returns: transformers' own output class, and what it has no field for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.request import Request
from specdec.stats import RequestStats


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' GenerateDecoderOnlyOutput with `finish_reasons`, `stats`, `logprobs` and `raw_logprobs`.

    `sequences` is [B, n + m]. `scores` and `logits` are tuples of m tensors [B, V] float32, as in transformers; for a
    row that has ended they hold zeros. `logprobs` and `raw_logprobs` are [B, m] float32, of the emitted tokens, and
    zero behind the end: the log-softmax of `scores` and of `logits`. `attentions`, `hidden_states` and
    `past_key_values` are always None.
    """

    finish_reasons: tuple[str, ...] | None = None
    stats: tuple[RequestStats, ...] | None = None
    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None


def sequences_of(input_ids: Tensor, requests: Sequence[Request], pad_token_id: int) -> Tensor:
    """Return [B, n + m] int64: `input_ids`, padding included, then the new tokens, padded on the right."""
    longest = max((len(r.new_tokens) for r in requests), default=0)
    tail = torch.full((len(requests), longest), pad_token_id, dtype=input_ids.dtype)
    for row, request in zip(tail, requests, strict=True):
        row[: len(request.new_tokens)] = torch.tensor(request.new_tokens, dtype=input_ids.dtype)
    return torch.cat([input_ids, tail.to(input_ids.device)], dim=1)


def output_of(sequences: Tensor, requests: Sequence[Request]) -> GenerateOutput:
    """Return the dict-like output of finished requests, with whatever was kept of their tokens."""
    longest = max((len(r.new_tokens) for r in requests), default=0)
    keep = requests[0].keep if requests else None
    tables: dict[str, Any] = {}
    for name in ("scores", "logits"):
        if keep is not None and getattr(keep, name):
            tables[name] = tuple(_column(requests, i, name).to(sequences.device) for i in range(longest))
    if keep is not None and keep.logprobs is not None:
        for name, attribute in (("logprobs", "logprob"), ("raw_logprobs", "raw_logprob")):
            table = torch.zeros(len(requests), longest)
            for row, request in zip(table, requests, strict=True):
                row[: len(request.records)] = torch.tensor([getattr(r, attribute) for r in request.records])
            tables[name] = table.to(sequences.device)
    return GenerateOutput(
        sequences=sequences,
        finish_reasons=tuple(r.finish_reason or "abort" for r in requests),
        stats=tuple(r.stats for r in requests),
        **tables,
    )


def _column(requests: Sequence[Request], position: int, name: str) -> Tensor:
    """Return [B, V] float32 of one position; zeros for rows that have ended."""
    rows = [getattr(r.records[position], name) if position < len(r.records) else None for r in requests]
    width = next(len(row) for row in rows if row is not None)
    return torch.stack([torch.zeros(width) if row is None else row for row in rows])
