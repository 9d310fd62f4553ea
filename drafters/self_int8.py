"""The target's own int8 copy drafts on the target's KV cache; verification overwrites what it wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.drafters.autoregression import draw_chain
from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, Segment, TokenTree
from specdec.models.int8_copy import int8_copy
from specdec.models.runner import ModelRunner


class SelfInt8Drafter:
    """Drafts with the target's own int8 copy, over the target's KV cache; needs no training and no second cache.

    Source: self-speculation on a quantised copy: Tiwari et al. 2025, QuantSpec, arXiv 2502.10424 (there with a
    quantised cache as well); quantisation as in `models/int8.py`.
    """

    name = "self_int8"
    features = FeatureSpec()
    shares_target_kv = True
    samples = True

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner, self._vocab_size = runner, vocab_size
        self.target_cache = runner.cache
        self.weight_bytes = runner.extra_weight_bytes  # of the int8 copy, beside the target's own
        self.max_position: int | None = runner.max_positions

    @classmethod
    def build(cls, context: DrafterContext) -> SelfInt8Drafter:
        return cls(int8_copy(context.runner, context.tokenizer), context.vocab_size)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        row = torch.zeros(1, dtype=torch.int64)

        def advance(rows: list[int], last: Tensor) -> Tensor:
            segments = [Segment(requests[i].request_id, last[j : j + 1], None, row) for j, i in enumerate(rows)]
            return self._runner.forward(segments).logits

        return draw_chain(requests, noise, advance, self._vocab_size)

    def observe(self, seen: Sequence[Observation]) -> None: ...

    def release(self, request_id: int) -> None: ...

    def reset(self) -> None: ...
