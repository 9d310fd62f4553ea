"""How an unmodified transformers model runs on our cache: its attention and mask functions are ours.

The model asks `create_causal_mask` and friends for masks; the answer here is only a marker that names the
pattern. The attention function then hands queries, keys and values to `KVCache.attend`, which knows the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from specdec.errors import UnsupportedModelError
from specdec.kv.cache import KVCache
from specdec.kv.plan import MaskPattern, StepPlan

# No "flash", no "/", no "paged|": transformers gives such names meanings of their own.
ATTENTION_NAME = "specdec"


@dataclass(slots=True)
class _Step:
    cache: KVCache
    plan: StepPlan
    patterns: list[MaskPattern | None]
    num_calls: int = 0


_STEP: ContextVar[_Step] = ContextVar("specdec_step")


@contextmanager
def running(cache: KVCache, plan: StepPlan) -> Iterator[_Step]:
    """Make `cache` and `plan` the ones that attention calls of this context work on."""
    step = _Step(cache, plan, [])
    token = _STEP.set(step)
    try:
        yield step
    finally:
        _STEP.reset(token)


def _current_step() -> _Step:
    step = _STEP.get(None)
    if step is None:
        raise UnsupportedModelError("a model with specdec's attention was called outside a ModelRunner")
    return step


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Any = causal_mask_function,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Return a marker tensor for the pattern of one kind of layer; called once per kind and forward."""
    step = _current_step()
    pattern = None
    if mask_function is not causal_mask_function:

        def allow(query: Tensor, key: Tensor) -> Tensor:
            zero = torch.zeros((), dtype=torch.int64, device=query.device)
            # The models' own mask functions decide by index arithmetic, so they work on absolute positions.
            result: Tensor = mask_function(zero, zero, query, key)
            return result

        pattern = MaskPattern(len(step.patterns), allow, local_size)
    step.patterns.append(pattern)
    # The pattern's number is the size of the batch dimension: Accelerate may move or copy a mask between devices, and
    # reading its values would make the CPU wait.
    return torch.zeros((len(step.patterns), 1, q_length, 1), dtype=torch.bool, device=device)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over the cache. query [1, H, T, D], key [1, h, T, D], value [1, h, T, E] -> [1, T, H, E]."""
    step = _current_step()
    marked = 0 if attention_mask is None or attention_mask.dim() != 4 else attention_mask.shape[0]
    if attention_mask is None or marked == 0 or attention_mask.shape != (marked, 1, query.shape[2], 1):
        marked = len(step.patterns) + 1  # no marker of ours
    if marked > len(step.patterns):
        raise UnsupportedModelError(
            f"{type(module).__name__} builds its own attention mask, which specdec cannot place over its KV cache"
        )
    step.num_calls += 1
    out = step.cache.attend(
        step.plan,
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scaling,
        pattern=step.patterns[marked - 1],
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


class _PassLayer(CacheLayerMixin):
    """Stands where transformers expects a cache layer; keys and values pass through to the attention call."""

    is_sliding = False
    is_linear = False
    is_dummy = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return int(query_length), 0

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    # Older 5.x releases ask under this name.
    def get_max_cache_shape(self) -> int:
        return -1


class _StoringLayer(_PassLayer):
    """Stores the rows in our cache and answers with everything the packed rows may look at."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[1, h, T, D] and [1, h, T, E] -> [1, h, N, D] and [1, h, N, E]."""
        step = _current_step()
        step.num_calls += 1
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        keys, values = step.cache.append(step.plan, self._layer, k, v)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def pass_through_cache(num_layers: int) -> Cache:
    """Return a transformers Cache that stores nothing, for models that ask our attention function."""
    return Cache(layers=[_PassLayer() for _ in range(num_layers)])


def storing_cache(num_layers: int) -> Cache:
    """Return a transformers Cache over ours, for models that attend by themselves to what `update` returns."""
    return Cache(layers=[_StoringLayer(layer) for layer in range(num_layers)])


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)
