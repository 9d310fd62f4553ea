"""Whether a model can run on this engine: named refusals from its config, before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

from specdec.errors import UnsupportedModelError

# Layers whose memory is a list of keys and values per position, which is what can be rolled back.
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Rotary tables that change with the longest position in the batch: a request's output would depend on its
# neighbours.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def unsupported_feature(model: Any) -> str | None:
    """Return the name of the first feature this engine cannot run exactly, or None."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "encoder-decoder architecture"
    if getattr(model, "_is_stateful", False):
        return "recurrent state (SSM or linear attention), which cannot be rolled back"
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES)
    if strange:
        return f"layers of type {', '.join(strange)}, whose state cannot be rolled back"
    if getattr(config, "alibi", False) or config.model_type in {"bloom", "mpt"}:
        return "ALiBi position biases"
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        return "keys and values shared across layers"
    if getattr(config, "index_topk", None):
        return "sparse attention with an indexer cache"
    rope = _rope_types(config) & BATCH_DEPENDENT_ROPE
    if rope:
        return f"{rope.pop()} RoPE, whose angles depend on the longest position in the batch"
    parameters = inspect.signature(model.forward).parameters
    for needed in ("past_key_values", "position_ids"):
        if needed not in parameters:
            return f"a forward without {needed}"
    return None


def _unsupported_object(model: Any) -> str | None:
    """Return what is wrong with the object, whatever its architecture, or None."""
    if hasattr(model, "_orig_mod"):
        return "the torch.compile wrapper around it (pass the model that was compiled)"
    for module in model.modules():
        own = module.parameters(recurse=False)
        if any(p.device.type == "meta" for p in own) and not hasattr(module, "_hf_hook"):
            return "weights on the meta device that no Accelerate hook loads"
    return None


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    entries = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in entries}


def refuse_unsupported(model: Any) -> None:
    """Raise UnsupportedModelError if `unsupported_feature` finds one, or if this is no causal LM at all."""
    if not (hasattr(model, "can_generate") and hasattr(model, "config") and model.can_generate()):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model that generates; pass one with a language modelling "
            "head, such as AutoModelForCausalLM gives"
        )
    feature = _unsupported_object(model) or unsupported_feature(model)
    if feature is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run on specdec's KV engine because of {feature}; "
            "use transformers' own generate() for it, or another target model"
        )
