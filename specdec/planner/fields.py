"""The fields of a config.json that the planner reads, and the values that each may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import ConfigError
from specdec.models.kv_shape import HEAD_DIMS, HEADS, HIDDEN, KV_HEADS

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "moe_topk")

_MOST_LAYERS = 10_000
_MOST = 10**9
_MOST_POSITIONS = 10**15  # some files say "no limit" with a large number


def _whole(low: int, high: int = _MOST) -> tuple[Callable[[Any], bool], str]:
    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return fits, f"a whole number from {low} to {high:,}"


def _is_list_of(kind: type[int] | type[str]) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(
            isinstance(item, str) if kind is str else _whole(0)[0](item) for item in value
        )

    return fits


def _is_pattern(value: Any) -> bool:
    return _whole(1)[0](value) or (isinstance(value, str) and value != "" and set(value) <= {"L", "G"})


_FLAG: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), "true or false")
_TYPES = (_is_list_of(str), "a list of names, one per layer")
_INDICES = (_is_list_of(int), "a list of layer numbers from 0")
_PART = (lambda value: isinstance(value, dict), "an object with fields")

_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_type": (lambda value: isinstance(value, str) and value != "", "a name, such as llama"),
    **dict.fromkeys(("dtype", "torch_dtype"), (lambda value: isinstance(value, str), "a name, such as bfloat16")),
    **dict.fromkeys(LAYERS, _whole(1, _MOST_LAYERS)),
    **dict.fromkeys((*HIDDEN, *HEADS, *KV_HEADS, *HEAD_DIMS, *INNER, "vocab_size"), _whole(1)),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _whole(1)),
    **dict.fromkeys(POSITIONS, _whole(1, _MOST_POSITIONS)),
    **dict.fromkeys((*EXPERTS, *CHOSEN), _whole(0)),
    **dict.fromkeys(("moe_intermediate_size", "attention_chunk_size", "window_size"), _whole(1)),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq"), _whole(1)),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "max_window_layers"), _whole(0)),
    "num_kv_shared_layers": _whole(0),
    "sliding_window": _whole(0, _MOST_POSITIONS),  # Qwen2-MoE writes 0 for none
    "sliding_window_pattern": (_is_pattern, "a whole number above 0, or a string of L and G"),
    "layer_types": _TYPES,
    "attention_layers": _TYPES,
    **dict.fromkeys(("mlp_only_layers", "moe_layers", "cross_attention_layers"), _INDICES),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias"), _FLAG),
    **dict.fromkeys(("multi_query", "new_decoder_architecture", "is_encoder_decoder"), _FLAG),
    **dict.fromkeys(("text_config", "language_config", "llm_config", "attn_config", "ffn_config"), _PART),
    "quantization_config": _PART,
    "compression_config": _PART,
}


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of a config, each checked when it is read. What is null counts as not said."""

    values: Mapping[str, Any]
    name: str  # of the model, for messages

    def get(self, field: str) -> Any:
        """Return a field's value, or None.

        Raises:
            ConfigError: it is none of those that are allowed.
        """
        value = self.values.get(field)
        if value is None:
            return None
        fits, allowed = _ALLOWED[field]
        if not fits(value):
            raise ConfigError(f"{self.name}: {field} is {_short(value)} in its config; allowed: {allowed}")
        return value

    def check(self) -> None:
        """Read every known field.

        Raises:
            ConfigError: one has a value that is not allowed, or two of them disagree.
        """
        for field in self.values:
            if field in _ALLOWED:
                self.get(field)
        kinds, layers = self.get("layer_types"), self.first(LAYERS)
        if kinds and layers is not None and len(kinds) != layers:
            raise ConfigError(f"{self.name}: layer_types has {len(kinds)} entries for {layers} layers")

    def first(self, names: Iterable[str]) -> Any:
        """Return the first of several spellings of a field that says something, or None."""
        return next((value for name in names if (value := self.get(name)) is not None), None)

    def number(self, *names: str) -> int:
        """Return the first of several spellings of a field.

        Raises:
            ConfigError: there is none of them.
        """
        found = self.first(names)
        if found is None:
            also = f" (nor {', '.join(names[1:])})" if names[1:] else ""
            raise ConfigError(
                f"{self.name}: its config has no {names[0]}{also}; give a complete config.json of a decoder"
            )
        return int(found)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}..."
