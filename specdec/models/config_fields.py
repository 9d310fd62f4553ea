"""What a model reads of its config: the fields of its text part, with the defaults of transformers' config class."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from specdec.models.kv_shape import KV_HEADS

# A config.json may have these without its class knowing them; the model then does without.
_ONLY_IF_DECLARED = {*KV_HEADS, "sliding_window", "attention_chunk_size"}
_STORAGE = {"quantization_config", "dtype", "torch_dtype"}
_NESTED = ("attn_config", "ffn_config")  # of DBRX and MPT


def is_known(model_type: str) -> bool:
    """Tell whether the installed transformers has a config class for a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def own_name(model_type: str, standard: str) -> str:
    """Return how a known model type's config class calls a field that others call `standard`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = (getattr(CONFIG_MAPPING[model_type], "attribute_map", None) or {}).get(standard, standard)
    return own if isinstance(own, str) else standard


def class_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json's text part as transformers' class completes them.

    Raises:
        Exception: whatever the class raises about the values it is given.
    """
    return text_fields(config_of(fields).get_text_config())


def config_of(fields: dict[str, Any]) -> Any:
    """Return the transformers config that a config.json stands for, without what says how its weights are stored.

    Raises:
        Exception: whatever the class raises about the values it is given.
    """
    from transformers import AutoConfig

    plain = {name: value for name, value in fields.items() if name not in _STORAGE}
    return AutoConfig.for_model(**copy.deepcopy(plain))  # classes change nested fields in place


def text_fields(text: Any) -> dict[str, Any]:
    """Return the fields of a text config under their own and their standard names.

    Those that decide the cache's size are left out where the class does not declare them: OPT and GPT-NeoX ignore a
    num_key_value_heads, Llama a sliding_window.
    """
    fields: dict[str, Any] = {}
    for name in _NESTED:
        part = getattr(text, name, None)
        if hasattr(part, "to_dict"):
            fields |= _declared(part)
    fields |= _declared(text)
    for standard, own in (getattr(text, "attribute_map", None) or {}).items():
        if isinstance(own, str) and own in fields:
            fields.setdefault(standard, fields[own])
    return fields


def _declared(config: Any) -> dict[str, Any]:
    found = config.to_dict()
    strange = {name for name in _ONLY_IF_DECLARED & set(found) if not _declares(type(config), name)}
    return {name: value for name, value in found.items() if name not in strange}


def _declares(config_class: Any, name: str) -> bool:
    """Tell whether a config class has a field: it takes it, or it sets it itself."""
    if name in inspect.signature(config_class.__init__).parameters or name in getattr(
        config_class, "attribute_map", {}
    ):
        return True
    try:
        return hasattr(config_class(), name)
    except Exception:  # a class without defaults
        return False
