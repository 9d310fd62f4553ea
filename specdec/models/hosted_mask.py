"""Running a transformers model that attends by itself: over keys and values we hand it, under a mask we prepared.

Older architectures (GPT-J, Falcon, CodeGen, MPT) do not go through transformers' AttentionInterface. Their attention
gives its new keys and values to the cache and attends to what comes back; our cache gives back those of all packed
requests, and a mask over the blocks keeps the requests and the branches of a tree apart.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UnsupportedModelError
from specdec.interfaces import FeatureSpec
from specdec.kv.cache import KVCache
from specdec.kv.plan import StepPlan
from specdec.models.attention_plug import running, storing_cache
from specdec.models.taps import Taps

# Attention code that takes an additive mask [1, 1, T, N] of floats.
_TAKES_FLOAT_MASKS = ("eager", "sdpa")


class MaskedProgram:
    """A clone of the caller's model with its own attention; see `HostedProgram` for the contract.

    A model without position_ids counts positions by slot (MPT's ALiBi), so its requests cannot stand side by side:
    each gets a forward of its own, and its trees do not conform.
    """

    def __init__(self, clone: Any) -> None:
        self.model = clone
        if getattr(clone.config, "_attn_implementation", "eager") not in _TAKES_FLOAT_MASKS:
            clone.set_attn_implementation("eager")
        self.num_layers: int = clone.config.get_text_config().num_hidden_layers
        self._cache = storing_cache(self.num_layers)
        self._taps = Taps(clone, self.num_layers)
        parameters = inspect.signature(clone.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters

    def __call__(
        self, cache: KVCache, plan: StepPlan, token_ids: Tensor, logit_rows: Tensor | None, spec: FeatureSpec
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [R, V] of `logit_rows` (None = all rows) and features [T, F]."""
        self._taps.prepare(spec)
        if self.takes_positions or len(plan.segments) == 1:
            return self._run(cache, plan, token_ids, logit_rows, spec)
        logits, features = [], []
        for segment, own in zip(plan.segments, plan.alone(), strict=True):
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            wanted = None if logit_rows is None else _within(logit_rows, rows)
            out, taken = self._run(cache, own, token_ids[rows], wanted, spec)
            logits.append(out)
            features += [] if taken is None else [taken]
        return torch.cat(logits), torch.cat(features) if features else None

    def _run(
        self, cache: KVCache, plan: StepPlan, token_ids: Tensor, logit_rows: Tensor | None, spec: FeatureSpec
    ) -> tuple[Tensor, Tensor | None]:
        keep = self._keeps_rows and logit_rows is not None
        extra: dict[str, Any] = {"logits_to_keep": logit_rows} if keep else {}
        if self.takes_positions:
            extra["position_ids"] = plan.positions[None]
        like = torch.empty(0, dtype=self.model.dtype, device=token_ids.device)
        with running(cache, plan) as step:
            out = self.model(
                input_ids=token_ids[None],
                attention_mask=plan.mask(like)[None, None],
                past_key_values=self._cache,
                use_cache=True,
                **extra,
            )
        if step.num_calls != self.num_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gave keys and values to its cache {step.num_calls} times for "
                f"{self.num_layers} layers: specdec cannot see its attention"
            )
        logits: Tensor = out.logits[0]
        if logit_rows is not None and not keep:
            logits = logits.index_select(0, logit_rows)
        return logits, self._taps.collect(spec)


def _within(rows: Tensor, own: slice) -> Tensor:
    """Return those of `rows` that lie in `own`, counted from its start."""
    return rows[(rows >= own.start) & (rows < own.stop)] - own.start
