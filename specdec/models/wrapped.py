"""What stands around or inside a transformers model: PEFT adapters and parallel wrappers; which inputs a call may have.

Adapters that replace modules (LoRA and its relatives) run as they are: the engine runs a copy of the model they sit in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from specdec.errors import ConfigError, UnsupportedModelError

# Wrappers whose forward is another one than that of the model inside, with what to do.
_PARALLEL = {
    "DataParallel": "pass its .module",
    "DistributedDataParallel": "pass its .module",
    "FullyShardedDataParallel": "load the model without FSDP; device_map spreads it over several devices",
}
# PEFT methods that choose per prompt what they do, by peft_type.
_BY_PROMPT = {
    "XLORA": "X-LoRA, which runs the model twice to weigh its adapters",
    "POLY": "Poly, which needs task_ids with every call",
}
_MEDIA = re.compile(
    r"(pixel|image|video|audio|vision|aspect_ratio|cross_attention|feature_attention|input_features|input_values)"
)
_REFUSED_INPUTS = {
    "adapter_names": "mixed-adapter batches are not supported; call set_adapter() and run each adapter's prompts apart",
    "alora_offsets": "activated LoRA is not supported; use a plain LoRA adapter",
    "task_ids": "adapters that are chosen by task are not supported; merge one with merge_and_unload()",
    "cache_position": "positions follow from attention_mask; leave it out",
    "decoder_input_ids": "encoder-decoder models are not supported",
    "encoder_outputs": "encoder-decoder models are not supported",
}
# Which tokens stand for an image: nothing where there is none.
_KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")


def unwrapped(model: Any) -> Any:
    """Return the transformers model that a call runs: what is inside of a PeftModel, else `model` itself.

    Its active adapters are inside of it, because PEFT puts them into the model's own modules.

    Raises:
        UnsupportedModelError: the wrapper or an adapter changes more than modules, by name, with what to do.
    """
    kind = type(model).__name__
    if kind in _PARALLEL and isinstance(model, nn.Module):
        raise UnsupportedModelError(f"the model is wrapped in {kind}, which specdec does not run; {_PARALLEL[kind]}")
    while _is_peft(model):
        model = _inside(model)
    if isinstance(model, nn.Module):
        _refuse_adapters(model)
    return model


def _is_peft(model: Any) -> bool:
    """Tell whether `model` is one of PEFT's own wrappers around a model; PEFT itself may be absent."""
    kinds = type(model).__mro__
    return any(c.__module__.partition(".")[0] == "peft" for c in kinds) and hasattr(model, "peft_config")


def _inside(model: Any) -> Any:
    """Return what a PeftModel or a tuner of PEFT wraps."""
    configs = model.peft_config
    names = getattr(model, "active_adapters", list(configs))
    names = names() if callable(names) else names
    for name, config in configs.items():
        peft_type = str(getattr(config.peft_type, "value", config.peft_type))
        if name in names and getattr(config, "is_prompt_learning", False):
            if getattr(model, "_adapters_disabled", False):
                return model.base_model
            raise UnsupportedModelError(
                f"adapter {name!r} is {peft_type}: its virtual tokens stand before the prompt and have no ids, which "
                "specdec's KV cache cannot place; use an adapter that replaces modules, such as LoRA, or disable it: "
                "with model.disable_adapter(): ..."
            )
        if peft_type in _BY_PROMPT:
            raise UnsupportedModelError(
                f"adapter {name!r} is {_BY_PROMPT[peft_type]}; use model.generate() for it, or another adapter type"
            )
    return model.model if hasattr(model, "model") and not hasattr(model, "base_model") else _base(model)


def _base(model: Any) -> Any:
    inner = model.base_model
    # A PeftModel holds a tuner, which holds the model; a prompt-learning one holds the model itself.
    return inner.model if _is_peft(inner) and isinstance(getattr(inner, "model", None), nn.Module) else inner


def adapter_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that PEFT has put around others, whoever called it."""
    return (m for m in model.modules() if hasattr(m, "_disable_adapters") and hasattr(m, "merged_adapters"))


def adapter_parts(model: nn.Module) -> set[nn.Module]:
    """Return every module that belongs to an adapter and not to the model it was added to."""
    parts: set[nn.Module] = set()
    for layer in adapter_layers(model):
        for name, child in layer.named_children():
            if name != "base_layer":
                parts.update(child.modules())
    return parts


def _refuse_adapters(model: nn.Module) -> None:
    """Raise UnsupportedModelError if an adapter would not do in a step what it does in plain decoding."""
    for layer in adapter_layers(model):
        merged: Any = layer.merged_adapters
        if merged and layer._disable_adapters:
            raise UnsupportedModelError(
                f"adapters {list(merged)} are merged into the weights and disabled; a forward would write the weights "
                "of your model to take them out again: call unmerge_adapter() first"
            )
        variants: Any = getattr(layer, "lora_variant", None) or {}
        active: Any = layer.active_adapters
        for name in active:
            if name in variants and "alora" in _name_of(variants[name]).lower():
                raise UnsupportedModelError(
                    f"adapter {name!r} is an activated LoRA, which begins to work at an invocation text in the prompt; "
                    "use model.generate() for it, or a plain LoRA adapter"
                )


def _name_of(thing: Any) -> str:
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__


def refuse_inputs(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's keyword arguments without the model inputs that say nothing for a text prompt.

    `token_type_ids` of zeros, which processors of multimodal models add to every text, go; the rest stays.

    Args:
        model: the model of the call.
        kwargs: of generate().

    Raises:
        ConfigError: one is an image, sound or other input that no text prompt has, by name.
    """
    left = dict(kwargs)
    for name, value in kwargs.items():
        if value is None:
            continue
        if name in _REFUSED_INPUTS:
            raise ConfigError(f"generate({name}=...) is not supported: {_REFUSED_INPUTS[name]}")
        if _MEDIA.match(name):
            raise ConfigError(
                f"generate({name}=...) is not supported: specdec runs text prompts only, also on multimodal models; "
                "use model.generate() for prompts with images, sound or video"
            )
        if name in _KINDS_OF_TOKENS:
            if not is_multimodal(model) or not isinstance(value, Tensor) or bool(value.any()):
                raise ConfigError(
                    f"generate({name}=...) is not supported: all tokens of a prompt are text; leave it out"
                )
            del left[name]
    return left


def is_multimodal(model: Any) -> bool:
    """Tell whether a model has a text model inside beside others, such as one for images."""
    config = getattr(model, "config", None)
    return config is not None and config.get_text_config() is not config
