"""Running a transformers model, unmodified, over our cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import UnsupportedModelError
from specdec.interfaces import FeatureSpec
from specdec.kv.cache import KVCache
from specdec.kv.plan import StepPlan
from specdec.models.attention_plug import ATTENTION_NAME, pass_through_cache, running
from specdec.models.taps import Taps


class AttentionNotSeenError(UnsupportedModelError):
    """A model's attention calls do not all come through transformers' AttentionInterface."""


class HostedProgram:
    """A clone of the caller's model with our attention plugged in."""

    def __init__(self, clone: Any) -> None:
        self.model = clone
        clone.set_attn_implementation(ATTENTION_NAME)
        self.num_layers: int = clone.config.get_text_config().num_hidden_layers
        self._cache = pass_through_cache(self.num_layers)
        self._taps = Taps(clone, self.num_layers)
        self._keeps_rows = "logits_to_keep" in inspect.signature(clone.forward).parameters

    def __call__(
        self, cache: KVCache, plan: StepPlan, token_ids: Tensor, logit_rows: Tensor | None, spec: FeatureSpec
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [R, V] of `logit_rows` (None = all rows) and features [T, F]."""
        self._taps.prepare(spec)
        keep = self._keeps_rows and logit_rows is not None
        extra = {"logits_to_keep": logit_rows} if keep else {}
        with running(cache, plan) as step:
            out = self.model(
                input_ids=token_ids[None],
                position_ids=plan.positions[None],
                past_key_values=self._cache,
                use_cache=True,
                **extra,
            )
        if step.num_calls != self.num_layers:
            raise AttentionNotSeenError(
                f"{type(self.model).__name__} made {step.num_calls} attention calls for {self.num_layers} layers: "
                "its attention does not go through transformers' AttentionInterface"
            )
        logits: Tensor = out.logits[0]
        if logit_rows is not None and not keep:
            logits = logits.index_select(0, logit_rows)
        return logits, self._taps.collect(spec)


def base_forward(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Return the logits [B, n, V] of the model's own forward without any cache."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits
