"""The shape of a decoder, read from the fields of a config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import ConfigError, UnsupportedModelError

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "n_head_kv")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
# What these classes of transformers take where a config.json is silent.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "num_experts_per_tok": 2, "num_local_experts": 8},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096},
    "gemma3_text": {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096},
    "gpt2": {"tie_word_embeddings": True},
    "qwen2": {"attention_bias": True},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128},
}
_WINDOW_EVERYWHERE = {"mistral", "mixtral", "phi3", "starcoder2"}
_RECURRENT_TYPES = (
    *("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba", "zamba2", "recurrent_gemma", "xlstm"),
    *("falcon_h1", "nemotron_h", "granitemoehybrid", "lfm2"),
)
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: keys and values are made from one narrow row per token."""

    rank: int  # width of that row
    rope_dim: int  # of the part of the key that carries positions, shared by all heads
    nope_dim: int
    query_rank: int | None


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts; shared ones count as dense layers."""

    num: int
    chosen: int
    num_layers: int  # that have them
    inner: int  # width of one
    num_shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the arithmetic needs to know of a decoder. Dimensions are those of one layer."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int  # per head
    value_dim: int
    inner: int  # of the dense feed-forward layers
    vocab_size: int
    tied: bool  # the output matrix is the embedding
    max_positions: int | None = None
    windows: tuple[int | None, ...] = ()  # of each layer; None = it attends to everything
    latent: Latent | None = None
    experts: Experts | None = None
    fields: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def attention(self) -> str:
        """Return the kind of attention, as papers call it."""
        if self.latent is not None:
            return "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def window_counts(self) -> Counter[int | None]:
        """Return how many layers have which window."""
        return Counter(self.windows)


def read_architecture(config: dict[str, Any], name: str = "the model") -> Architecture:
    """Return the shape that a config.json describes; of a model with several parts, its text part.

    Args:
        config: the fields of the file.
        name: of the model, for messages.

    Raises:
        ConfigError: a field is missing or no number.
        UnsupportedModelError: it is no decoder whose layers all attend.
    """
    whole = config
    for part in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(part), dict):
            config = {"tie_word_embeddings": whole.get("tie_word_embeddings"), **config[part]}
            config = {key: value for key, value in config.items() if value is not None}
            break
    kind = str(config.get("model_type") or whole.get("model_type") or "")
    _refuse(config, kind, name)
    config = {**_CLASS_DEFAULTS.get(kind, {}), **config}
    layers, hidden, heads = (_number(config, names, name) for names in (_LAYERS, _HIDDEN, _HEADS))
    latent = _latent(config, name)
    kv_heads = heads if latent else _kv_heads(config, heads, name)
    head_dim = _optional(config, ("head_dim", "kv_channels", "attention_head_dim"), name)
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(f"{name}: hidden_size {hidden} is no multiple of {heads} heads, and there is no head_dim")
        head_dim = hidden // heads
    return Architecture(
        model_type=kind or "unknown",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_dim=head_dim if latent is None else latent.nope_dim + latent.rope_dim,
        value_dim=head_dim if latent is None else _number(config, ("v_head_dim",), name),
        inner=_optional(config, _INNER, name) or 4 * hidden,
        vocab_size=_number(config, ("vocab_size",), name),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=_optional(config, _POSITIONS, name),
        windows=_windows(config, kind, layers, name),
        latent=latent,
        experts=_experts(config, layers, name),
        fields=config,
    )


def _refuse(config: dict[str, Any], kind: str, name: str) -> None:
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model ({kind}); only decoders can be planned")
    if config.get("num_kv_shared_layers"):
        raise UnsupportedModelError(
            f"{name} ({kind}) shares keys and values between layers, which the planner cannot count"
        )
    kinds = config.get("layer_types")
    odd = {str(k) for k in kinds} - _ATTENDING if isinstance(kinds, list) else set()
    if kind in _RECURRENT_TYPES or odd:
        what = f"layers of type {', '.join(sorted(odd))}" if odd else "layers with a recurrent state"
        raise UnsupportedModelError(
            f"{name} ({kind or 'no model_type'}) has {what}, whose memory and speed the planner has no formula for; it "
            "knows decoders in which every layer attends to keys and values"
        )


def _optional(config: dict[str, Any], names: Iterable[str], name: str) -> int | None:
    for key in names:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: {key} is {value!r} in its config; allowed: a whole number above 0")
        return value
    return None


def _number(config: dict[str, Any], names: tuple[str, ...], name: str) -> int:
    found = _optional(config, names, name)
    if found is None:
        also = f" (nor {', '.join(names[1:])})" if names[1:] else ""
        raise ConfigError(f"{name}: its config has no {names[0]}{also}; give a complete config.json of a decoder")
    return found


def _kv_heads(config: dict[str, Any], heads: int, name: str) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    found = _optional(config, _KV_HEADS, name) or heads
    if heads % found:
        raise ConfigError(f"{name}: {heads} attention heads cannot share {found} key and value heads evenly")
    return found


def _latent(config: dict[str, Any], name: str) -> Latent | None:
    rank = _optional(config, ("kv_lora_rank",), name)
    if rank is None:
        return None
    return Latent(
        rank=rank,
        rope_dim=_number(config, ("qk_rope_head_dim",), name),
        nope_dim=_number(config, ("qk_nope_head_dim",), name),
        query_rank=_optional(config, ("q_lora_rank",), name),
    )


def _experts(config: dict[str, Any], layers: int, name: str) -> Experts | None:
    num = _optional(config, _EXPERTS, name)
    if num is None or num == 1:
        return None
    chosen = _number(config, _CHOSEN, name)
    if chosen > num:
        raise ConfigError(f"{name}: {chosen} experts are chosen per token, but there are only {num}")
    shared = config.get("n_shared_experts") or 0
    inner = _optional(config, ("moe_intermediate_size", *_INNER), name)
    if inner is None:
        raise ConfigError(f"{name}: its config has experts but no moe_intermediate_size")
    return Experts(num, chosen, sum(_has_experts(config, i) for i in range(layers)), inner, int(shared))


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    if layer < (config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    if "decoder_sparse_step" in config:
        return (layer + 1) % (config["decoder_sparse_step"] or 1) == 0
    return layer % (config.get("moe_layer_freq") or 1) == 0


def _windows(config: dict[str, Any], kind: str, layers: int, name: str) -> tuple[int | None, ...]:
    """Return the window of each layer, by `layer_types` or by the rule of the model type."""
    window = config.get("sliding_window")
    window = window if isinstance(window, int) and window > 0 else None
    sizes = {"sliding_attention": window, "chunked_attention": config.get("attention_chunk_size") or window}
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        if len(kinds) != layers:
            raise ConfigError(f"{name}: layer_types has {len(kinds)} entries for {layers} layers")
        return tuple(sizes.get(str(k)) for k in kinds)
    if kind in _WINDOW_EVERYWHERE:
        return (window,) * layers
    if kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        first = config.get("max_window_layers") or 0
        return tuple(window if config.get("use_sliding_window") and i >= first else None for i in range(layers))
    if kind == "gemma2":
        return tuple(None if i % 2 else window for i in range(layers))
    if kind == "gemma3_text":
        period = config.get("sliding_window_pattern") or 6
        return tuple(window if (i + 1) % period else None for i in range(layers))
    return (None,) * layers
