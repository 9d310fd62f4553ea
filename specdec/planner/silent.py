"""What a config.json does not say: completed as transformers' config class completes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.errors import ConfigError
from specdec.models.kv_shape import HEADS, HIDDEN
from specdec.planner.fields import LAYERS, Fields

_PARTS = ("text_config", "language_config", "llm_config")
_BASE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_SHARED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
_QWEN_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers")
# By model type, the fields that decide memory and traffic. A config.json that says all of them is read as it is, in no
# time; any other goes through transformers' class, whose import takes seconds. A test holds that both read the same.
COMPLETE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "granite", "olmo2"), _BASE),
    **dict.fromkeys(("mistral", "phi3"), (*_BASE, "sliding_window")),
    "mixtral": (*_BASE, "sliding_window", "num_local_experts", "num_experts_per_tok"),
    "qwen2": (*_BASE, "use_sliding_window"),
    "qwen3": (*_BASE, "head_dim", "use_sliding_window"),
    "qwen3_moe": (*_BASE, "head_dim", "use_sliding_window", *_QWEN_MOE),
    "gemma": (*_BASE, "head_dim"),
    **dict.fromkeys(("gemma2", "gemma3_text"), (*_BASE, "head_dim", "sliding_window", "layer_types")),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), (*_BASE, *_LATENT, *_SHARED, "first_k_dense_replace")),
}
_WINDOWS = ("sliding_window", "attention_chunk_size", "layer_types")


@dataclass(frozen=True, slots=True)
class Config:
    """A config.json: all of its fields, and those of its text part."""

    name: str  # of the model, for messages
    whole: dict[str, Any]
    text: dict[str, Any]
    part: str | None  # which field holds the text part; None = the config is that of a text model

    @property
    def model_type(self) -> str:
        return str(self.text["model_type"])


def split(config: dict[str, Any], name: str) -> Config:
    """Return a config.json's fields with those of its text part.

    Raises:
        ConfigError: there is no model type, or the part is no object.
    """
    whole = Fields(config, name)
    part = next((key for key in _PARTS if whole.get(key) is not None), None)
    text = config if part is None else config[part]
    kind = Fields(text, name).get("model_type") or whole.get("model_type")
    if kind is None:
        raise ConfigError(f"{name}: its config has no model_type; give a config.json as transformers writes it")
    if part is None:
        return Config(name, config, config, None)
    outer = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    return Config(name, config, {**outer, **text, "model_type": kind}, part)


def complete(config: Config) -> tuple[dict[str, Any], str]:
    """Return the text part's fields with the defaults of its class, and a note if there is no such class.

    Raises:
        ConfigError: a field is missing that no config.json leaves out, or the class refuses a value.
    """
    name, text, kind = config.name, config.text, config.model_type
    known = COMPLETE.get(kind)
    if known is not None and all(field in text for field in known) and not text.get("use_sliding_window"):
        return {key: value for key, value in text.items() if key not in _WINDOWS or key in known}, ""
    from specdec.models.config_fields import class_fields, is_known, own_name

    if config.part is None:  # of a part, a file says only where it differs from its class; of a text model everything
        for names in (LAYERS, HIDDEN, HEADS, ("vocab_size",)):
            if not is_known(kind) or own_name(kind, names[0]) not in text:
                Fields(text, name).number(*names)
    by_whole = config.part in (None, "text_config") and is_known(str(config.whole.get("model_type")))
    if not by_whole and not is_known(kind):
        nested = [text.get(key) or {} for key in ("ffn_config", "attn_config")]
        note = f"transformers has no class for model type {kind!r}: what its config does not say is taken as Llama's"
        return {**nested[0], **nested[1], **text}, note
    try:
        found = class_fields(config.whole if by_whole else text)
    except Exception as error:  # classes check values in their own ways
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"{name}: transformers' config class of {kind!r} does not take its values: {reason}"
        ) from error
    if text.get("tie_word_embeddings") is not None:
        found["tie_word_embeddings"] = text["tie_word_embeddings"]
    return found, ""
