"""Whether a model can run on this engine: named refusals from its config and class, before anything runs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from specdec.errors import UnsupportedModelError
from specdec.models.quantised import coupled_rows
from specdec.models.wrapped import unwrapped

# Layers whose memory is a list of keys and values per position, which is what can be rolled back.
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Rotary tables that change with the longest position in the batch: a request's output would depend on its
# neighbours.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_OTHERWISE = "use transformers' own generate() for it, or another target model"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a model cannot run: the feature's name, what is wrong with it here, what to do."""

    feature: str
    detail: str = ""
    advice: str = _OTHERWISE

    @property
    def reason(self) -> str:
        return f"{self.feature}: {self.detail}" if self.detail else self.feature


def find_refusal(config: Any, model_class: Any = None) -> Refusal | None:
    """Return the first feature of a config, and of the class built from it, that cannot run exactly, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return Refusal(
            "encoder-decoder",
            "an encoder-decoder architecture attends to a second sequence",
            "use a decoder-only model, or transformers' own generate() for this one",
        )
    text = config.get_text_config()
    return _refused_state(text, model_class) or _refused_positions(text) or _refused_forward(model_class)


def _refused_state(config: Any, model_class: Any) -> Refusal | None:
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES)
    if getattr(model_class, "_is_stateful", False) or any("linear" in kind or "mamba" in kind for kind in strange):
        return Refusal("recurrent state", "the state of SSM or linear-attention layers cannot be rolled back")
    if getattr(config, "index_topk", None) or getattr(config, "indexer_types", None):
        return Refusal("sparse attention indexer", "its own cache of index keys cannot be rolled back")
    if strange:
        return Refusal(f"layers of type {', '.join(strange)}", "their state cannot be rolled back")
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        return Refusal("shared KV layers", "layers read keys and values that other layers have stored")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # PaliGemma, for one
        return Refusal("bidirectional attention", "tokens of a prompt see later ones, which causal KV has not seen")
    if config.model_type == "gpt_neo":
        return Refusal(
            "attention mask of its own",
            "its layers cut causality and the local window by slot, which packed requests and trees shift",
        )
    return None


def _refused_positions(config: Any) -> Refusal | None:
    # MPT's biases fall with the slot alone, so chains are right one request at a time; these add them to the mask.
    if getattr(config, "alibi", False) or config.model_type == "bloom":
        return Refusal("ALiBi", "its position biases are built from a padding mask, not from positions")
    rope = sorted(_rope_types(config) & BATCH_DEPENDENT_ROPE)
    if rope:
        return Refusal(
            f"{rope[0]} RoPE",
            "its angles depend on the longest position in the batch",
            "use transformers' own generate() for it, a context short enough to load the model without RoPE scaling, "
            "or another target model",
        )
    return None


def _refused_forward(model_class: Any) -> Refusal | None:
    if model_class is None:
        return None
    parameters = inspect.signature(model_class.forward).parameters
    if "past_key_values" not in parameters:
        return Refusal("no KV cache", "its forward has no past_key_values")
    return None


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    entries = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in entries}


def why_chains_only(config: Any) -> str:
    """Return the feature that keeps a model from trees, for one whose chains conform and whose trees do not."""
    if config.get_text_config().model_type == "mpt":
        return "ALiBi"
    return "positions counted by slot"


def max_positions(config: Any) -> int | None:
    """Return how many positions a model was built for, or None if its config names no limit."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len"):
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def _unsupported_object(model: Any) -> str | None:
    """Return what is wrong with the object, whatever its architecture, or None."""
    if hasattr(model, "_orig_mod"):
        return "the torch.compile wrapper around it (pass the model that was compiled)"
    for module in model.modules():
        own = module.parameters(recurse=False)
        if any(p.device.type == "meta" for p in own) and not hasattr(module, "_hf_hook"):
            return "weights on the meta device that no Accelerate hook loads"
    return coupled_rows(model)


def refuse_unsupported(model: Any) -> None:
    """Raise UnsupportedModelError if `find_refusal` finds a feature, or if this is no causal LM at all."""
    model = unwrapped(model)
    if not (hasattr(model, "can_generate") and hasattr(model, "config") and model.can_generate()):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model that generates; pass one with a language modelling "
            "head, such as AutoModelForCausalLM gives"
        )
    wrong = _unsupported_object(model)
    refusal = Refusal(wrong) if wrong else find_refusal(model.config, model)
    if refusal is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run on specdec's KV engine because of {refusal.reason}; {refusal.advice}"
        )
