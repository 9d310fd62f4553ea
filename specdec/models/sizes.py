"""How large a model is, from its config alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from specdec.errors import UnsupportedModelError
from specdec.models.config_fields import config_of, text_fields
from specdec.models.int8_copy import linear_share
from specdec.models.kv_shape import kv_shape
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

    Of a model with several parts the text part is built, unless transformers has it only inside of the whole.

    Raises:
        UnsupportedModelError: it keeps a state beside keys and values.
        Exception: whatever transformers and the model's code raise.
    """
    from specdec.models.described import describe

    config = config_of(fields)
    text = config.get_text_config()
    if fields.get("tie_word_embeddings") is not None and "tie_word_embeddings" not in (fields.get("text_config") or {}):
        text.tie_word_embeddings = fields["tie_word_embeddings"]
    found = describe(text)
    if found.model_class is None:
        found = describe(config)
    if found.model_class is None:
        raise ValueError(f"transformers has no causal language model for {found.architecture}")
    if getattr(found.model_class, "_is_stateful", False):
        raise UnsupportedModelError(f"{found.architecture} keeps a state that is no keys and values")
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
        of_small: the count that was found on an instance of `small`; None is returned where the formula does not give
            it, as with layers of different widths.
    """
    return _kv_values(config) if _kv_values(small) == of_small else None


def _kv_values(config: Any) -> int:
    text = config.get_text_config()
    return kv_shape(text_fields(text)).values_per_token * int(text.num_hidden_layers)
