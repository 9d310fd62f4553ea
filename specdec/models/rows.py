"""One row's view of logits processors and stopping criteria that were written for a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from specdec.errors import ConfigError


def processor_for_row(processor: Any, row: int, num_rows: int) -> Any:
    """Return `processor` as it acts on `row` of `num_rows`, to be called with that row alone.

    Those of transformers that hold something per row of their batch get their own part; others are returned as they
    are.
    """
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        function = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, token_ids: function(row, token_ids), 1)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        return _with_part(processor, "prompt_ignore_length", row, num_rows)
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        return _with_part(processor, "encoder_input_ids", row, num_rows)
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        own = _with_part(processor, "generated_ngrams", row, num_rows)
        own.batch_size = 1
        return own
    return processor


def _with_part(processor: Any, name: str, row: int, num_rows: int) -> Any:
    """Return a copy whose attribute `name` holds one row's part; a prompt may stand for several rows in turn."""
    whole = getattr(processor, name, None)
    own = copy.copy(processor)
    if isinstance(whole, Tensor | list) and len(whole):
        at = row // max(1, num_rows // len(whole))
        setattr(own, name, whole[at : at + 1])
    return own


class PaddedProcessor:
    """Shows a processor the padding on a row's left, as transformers' generate() does; the engine knows of none."""

    def __init__(self, processor: Any, padding: Sequence[int]) -> None:
        self.processor = processor
        self.name = type(processor).__name__
        self._padding = torch.tensor([list(padding)], dtype=torch.int64)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._padding.device != input_ids.device:
            self._padding = self._padding.to(input_ids.device)
        return self.processor(torch.cat([self._padding, input_ids], dim=1), scores)


class RowCriteria:
    """A stop criterion of the engine from transformers' stopping criteria, asked about one row [1, n] at a time.

    Like transformers, it asks all of them about every token. `scores` is None, as there without output_scores.
    """

    def __init__(self, criteria: Sequence[Any], padding: Sequence[int], device: torch.device) -> None:
        self._criteria, self._padding, self._device = tuple(criteria), list(padding), device

    def __call__(self, tokens: Sequence[int]) -> bool | str:
        ids = torch.tensor([[*self._padding, *tokens]], dtype=torch.int64, device=self._device)
        met = [criterion for criterion in self._criteria if self._ask(criterion, ids)]
        if met and all(isinstance(criterion, MaxTimeCriteria) for criterion in met):
            return "time"
        return bool(met)

    @staticmethod
    def _ask(criterion: Any, ids: Tensor) -> bool:
        answer = criterion(ids, None)
        if isinstance(answer, Tensor) and answer.numel() != 1:
            raise ConfigError(
                f"stopping criterion {type(criterion).__name__} returned shape {tuple(answer.shape)} for one row; "
                "allowed: one truth value per row, and rows are asked about one at a time"
            )
        return bool(answer)
