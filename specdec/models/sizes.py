"""How large a model is, from its config alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from specdec.models.int8_copy import linear_share
from specdec.models.pretrained import quiet


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Of all parameters, tied ones counted once."""

    num_parameters: int
    num_bytes: int
    linear_share: float  # see `int8_copy.linear_share`


def weight_sizes(config: Any, model_class: Any, dtype: torch.dtype) -> WeightSizes:
    """Return the sizes of a model's parameters in `dtype`; it is built on the meta device, which takes no memory.

    Raises:
        Exception: whatever the model's code raises.
    """
    return sizes_of(_without_weights(config, model_class, dtype))


def named_parameters(fields: dict[str, Any]) -> list[tuple[str, int]]:
    """Return (name, number of weights) of the parameters of the causal LM of a config.json, tied ones once.

    Raises:
        Exception: whatever transformers and the model's code raise.
    """
    from transformers import AutoConfig

    from specdec.models.described import describe

    config = AutoConfig.for_model(**fields)
    found = describe(config)
    if found.model_class is None:
        raise ValueError(f"transformers has no causal language model for {found.architecture}")
    model = _without_weights(found.config, found.model_class, torch.bfloat16)
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


def _without_weights(config: Any, model_class: Any, dtype: torch.dtype) -> Any:
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config()
    with quiet(), torch.device("meta"):
        return model_class._from_config(config, dtype=dtype)


def sizes_of(model: Any) -> WeightSizes:
    """Return the sizes of a model's parameters as they are."""
    parameters = list(model.parameters())
    return WeightSizes(
        sum(p.numel() for p in parameters),
        sum(p.numel() * p.element_size() for p in parameters),
        linear_share(model),
    )


def layer_patterns(config: Any) -> dict[str, int]:
    """Return how many layers attend in which way."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return dict(Counter(kinds))
    window = getattr(text, "sliding_window", None)
    return {"sliding_attention" if window else "full_attention": text.num_hidden_layers}


def kv_values_per_token(config: Any, small: Any, of_small: int | None) -> int | None:
    """Return how many numbers a token's keys and values are, over all layers, as this engine's cache stores them.

    Args:
        config: of the model.
        small: what `shrink` made of it.
        of_small: the count that was found on an instance of `small`; None is returned where no formula gives it.
    """
    # Some models ignore a num_key_value_heads in their config.
    for grouped in (True, False):
        if _kv_values(small, grouped) == of_small:
            return _kv_values(config, grouped)
    return None


def _kv_values(config: Any, grouped: bool) -> int:
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or heads
    if not grouped or getattr(text, "new_decoder_architecture", False):
        kv_heads = heads
    elif getattr(text, "multi_query", False):
        kv_heads = 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key = value = kv_heads * width
    if getattr(text, "kv_lora_rank", None):  # latent attention stores expanded keys and values
        key = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
        value = heads * text.v_head_dim
    return int((key + value) * text.num_hidden_layers)
