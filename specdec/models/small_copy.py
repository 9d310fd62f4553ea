"""A smaller model made of some of a model's own blocks: what a distilled draft model begins as."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import ConfigError, UnsupportedModelError
from specdec.models.taps import find_blocks


def small_copy(model: Any, layers: Sequence[int]) -> Any:
    """Return a model of the same class with copies of the blocks `layers`, in float32, in that order.

    The embedding and the output head are the model's own modules and frozen; blocks and final norm are copies that
    can be trained.

    Raises:
        ConfigError: a block is named that the model has not.
        UnsupportedModelError: the model is not built of a list of blocks, or its class cannot be built smaller.
    """
    text = model.config.get_text_config()
    bad = [i for i in layers if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < text.num_hidden_layers]
    if bad or not layers:
        raise ConfigError(f"layers={list(layers)!r}; allowed: at least one of 0 to {text.num_hidden_layers - 1}")
    config = small_config(model.config, layers)
    small = build_small(config, model)
    blocks = find_blocks(model, text.num_hidden_layers)
    own = find_blocks(small, len(layers))
    with torch.no_grad():
        for block, layer in zip(own, layers, strict=True):
            block.load_state_dict(blocks[layer].state_dict())
        theirs = dict(model.named_parameters())
        for name, parameter in small.named_parameters():
            if parameter.requires_grad and name in theirs and not _inside(name, small, own):
                parameter.copy_(theirs[name])
    return small


def small_config(config: Any, layers: Sequence[int]) -> Any:
    """Return a config for the blocks `layers` of a model with `config`."""
    small = copy.deepcopy(config)
    small._attn_implementation = "sdpa"  # a runner's clone names specdec's own, which works in a runner only
    text = small.get_text_config()
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = [text.layer_types[i] for i in layers]
    return small


def build_small(config: Any, model: Any) -> Any:
    """Return a model of `config` and of the class of `model`, around that one's own embedding and output head.

    Raises:
        UnsupportedModelError: the class cannot be built from that config.
    """
    try:
        with torch.device("meta"):  # its embedding is replaced at once, and may be larger than everything else
            small = type(model)(config)
        small.set_input_embeddings(nn.Embedding(1, 1))
        small.set_output_embeddings(nn.Linear(1, 1, bias=False))
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:  # whatever a class makes of such a config
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be built with {config.get_text_config().num_hidden_layers} blocks: {error}"
        ) from error
    small = small.to_empty(device="cpu").to(torch.float32)
    _fill_buffers(small, config)
    small.set_input_embeddings(model.get_input_embeddings())
    small.set_output_embeddings(model.get_output_embeddings())
    for module in (small.get_input_embeddings(), small.get_output_embeddings()):
        for parameter in module.parameters():
            parameter.requires_grad_(False)
    return small


def _fill_buffers(small: Any, config: Any) -> None:
    """Give modules that compute their buffers when they are built (rotary tables) real ones."""
    for parent in list(small.modules()):
        for name, child in list(parent.named_children()):
            if "Rotary" in type(child).__name__:
                setattr(parent, name, type(child)(config.get_text_config()))


def own_tensors(small: Any) -> dict[str, Tensor]:
    """Return what is the small model's own: its parameters without the shared embedding and head."""
    return {name: p.detach() for name, p in small.named_parameters() if p.requires_grad}


def _inside(name: str, model: nn.Module, blocks: Iterable[nn.Module]) -> bool:
    ids = {id(p) for block in blocks for p in block.parameters()}
    return id(model.get_parameter(name)) in ids
