"""A small config of the same architecture: every kind of layer and pattern, a few thousand times fewer weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 128
WINDOW = 8
POSITIONS = 128
MAX_LAYERS = 4
_HEAD_DIM = 16
_INNER = 32  # of feed-forward layers
_EXPERTS = 4
_GROUP = 8  # most query heads per key head

_LAYER_COUNT = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
_HEADS = {"num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads"}
_KV_HEADS = {"num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"}
_HEAD_DIMS = {"head_dim", "attention_head_dim", "swa_head_dim", "kv_channels", "query_pre_attn_scalar"}
_POSITION_COUNT = {"max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"}
_EXPERT_COUNT = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"}
_CHOSEN_EXPERTS = {"num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"}
_EXPERT_GROUPS = {"n_group", "num_expert_group"}
# How many layers of a kind come first; how often a kind returns; which layers are of a kind.
_FIRST_LAYERS = {"first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index"}
_PERIODS = {"no_rope_layer_interval", "decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"}
_LAYER_INDICES = {"moe_layers", "mlp_only_layers", "full_attn_idxs"}
_NESTED = {"attn_config", "ffn_config", "rope_parameters"}
_WINDOW = re.compile(r"(sliding_window|window_size|window_len|chunk_size|local_attention)(_size)?$")
_NO_WINDOW = re.compile(r"mamba|^chunk_size|feed_forward")
_INNER_SIZES = re.compile(r"(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|dim_ff|dff|feed_forward_size)(_mlp)?$")
_DROPPED = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id", "num_labels", "problem_type"),
    *("quantization_config", "torch_dtype", "transformers_version"),
}
# Multi-head latent attention: three widths that differ, so that none can stand for another.
_LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "qk_head_dim": 24, "v_head_dim": 12}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Old and new sizes that fields have to agree on."""

    layers: int
    kept: tuple[int, ...]  # which layers remain
    heads: int
    kv_heads: int
    new_heads: int
    new_kv_heads: int
    head_dim: int
    new_head_dim: int
    hidden: int
    new_hidden: int
    positions: int
    latent: bool


def shrink(config: Any) -> Any:
    """Return a small config of the class of `config` (of its text part, where it has several).

    Raises:
        ValueError: a window's size cannot be found, so it could not be crossed.
        Exception: whatever a config of unfamiliar fields raises; the caller names it.
    """
    text = config.get_text_config()
    data: dict[str, Any] = text.to_dict()
    sizes = _sizes(text, data)
    small = {name: _smaller(name, value, sizes) for name, value in data.items() if name not in _DROPPED}
    made = type(text)(**{**small, "tie_word_embeddings": False})
    kinds = set(getattr(made, "layer_types", None) or ()) - {"full_attention"}
    if kinds and not windows(made):
        raise ValueError(f"layers of type {', '.join(sorted(kinds))} whose size has no familiar name")
    return made


def windows(config: Any) -> list[int]:
    """Return the sizes of all windows and chunks that a config names."""
    data = config.get_text_config().to_dict()
    return [value for name, value in data.items() if _is_window(name, value)]


def _is_window(name: str, value: Any) -> bool:
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return is_size and bool(_WINDOW.search(name)) and not _NO_WINDOW.search(name)


def _sizes(config: Any, data: dict[str, Any]) -> _Sizes:
    layers, heads, hidden = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    kv_heads = next((data[name] for name in sorted(_KV_HEADS) if data.get(name)), heads)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    group = max(1, heads // kv_heads)
    new_kv_heads = min(kv_heads, 4 if group == 1 else 2)
    new_heads = new_kv_heads * min(group, _GROUP)
    new_head_dim = min(head_dim, _HEAD_DIM)
    # Where heads and hidden size are independent, they stay so.
    per_head = new_head_dim if hidden == heads * head_dim else 12
    return _Sizes(
        layers=layers,
        kept=_kept_layers(data, layers),
        heads=heads,
        kv_heads=kv_heads,
        new_heads=new_heads,
        new_kv_heads=new_kv_heads,
        head_dim=head_dim,
        new_head_dim=new_head_dim,
        hidden=hidden,
        new_hidden=new_heads * per_head,
        positions=max(1, max((data.get(name) or 0 for name in _POSITION_COUNT), default=0)),
        latent=bool(data.get("kv_lora_rank")),
    )


def _kept_layers(data: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Return 2 to 4 layers, among them one of every kind as far as four can show it."""
    lists = [v for name, v in data.items() if _is_per_layer(v, layers) and name not in _LAYER_INDICES]
    kinds = [tuple(str(v[i]) for v in lists) for i in range(layers)]
    for name in sorted(_FIRST_LAYERS):
        first = data.get(name) or 0
        kinds = [(*kind, str(i < first)) for i, kind in enumerate(kinds)]
    types = data.get("layer_types") or [None] * layers
    chosen = [types.index(kind) for kind in dict.fromkeys(types)]
    chosen += [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    chosen += range(min(2, layers))
    kept = list(dict.fromkeys(chosen))[:MAX_LAYERS]
    return tuple(sorted(kept))


def _is_per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == layers


def _smaller(name: str, value: Any, sizes: _Sizes) -> Any:
    if name in _NESTED and isinstance(value, dict):
        return {k: _smaller(k, v, sizes) for k, v in value.items() if k not in _DROPPED}
    if name == "mrope_section" and isinstance(value, list | tuple):
        return [max(1, part * sizes.new_head_dim // sizes.head_dim) for part in value]
    if name in _LAYER_INDICES and isinstance(value, list | tuple):
        return [i for i, layer in enumerate(sizes.kept) if layer in value]
    if _is_per_layer(value, sizes.layers) and sizes.layers > 1:
        return [value[layer] for layer in sizes.kept]
    if name.endswith("token_id"):
        return [1] if isinstance(value, list) else value and 1
    if name == "head_dim" and value is None:
        return sizes.new_head_dim
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return next((size(value) for fits, size in _rules(sizes) if fits(name, value)), value)


_Rule = tuple[Callable[[str, int], bool], Callable[[int], int]]


def _rules(sizes: _Sizes) -> Sequence[_Rule]:
    """Return (which fields, what becomes of their value), the first that fits decides."""
    kept, count = sizes.kept, len(sizes.kept)

    def named(names: set[str]) -> Callable[[str, int], bool]:
        return lambda name, value: name in names

    def at_most(limit: int) -> Callable[[int], int]:
        return lambda value: min(value, limit)

    def head_dim(value: int) -> int:
        if not sizes.latent:
            return sizes.new_head_dim
        return _LATENT["qk_rope_head_dim"] if value <= 64 else _LATENT["qk_head_dim"]

    latent: list[_Rule] = [(named({name}), at_most(size)) for name, size in _LATENT.items()]
    return [
        (named(_LAYER_COUNT), lambda value: count),
        (named(_HEADS), lambda value: sizes.new_heads),
        (named(_KV_HEADS), lambda value: sizes.new_kv_heads),
        *latent,
        (named(_HEAD_DIMS), head_dim),
        (named({"rotary_dim"}), lambda value: max(2, value * sizes.new_head_dim // sizes.head_dim // 2 * 2)),
        (named(_POSITION_COUNT), at_most(POSITIONS)),
        # RoPE scaling keeps its factor.
        (
            named({"original_max_position_embeddings"}),
            lambda value: max(1, value * min(sizes.positions, POSITIONS) // sizes.positions),
        ),
        (named(_EXPERT_COUNT), at_most(_EXPERTS)),
        (named(_CHOSEN_EXPERTS), at_most(2)),
        (named(_EXPERT_GROUPS), at_most(2)),
        (named({"topk_group"}), at_most(1)),
        (named(_FIRST_LAYERS), lambda value: sum(layer < value for layer in kept)),
        (named({"moe_layer_end_index"}), lambda value: sum(layer <= value for layer in kept) - 1),
        (named(_PERIODS), at_most(2)),
        (_is_window, at_most(WINDOW)),
        (lambda name, value: "vocab_size" in name, at_most(VOCAB_SIZE)),
        (lambda name, value: name.endswith(("_rank", "_per_layer_input")), at_most(16)),
        (lambda name, value: bool(_INNER_SIZES.search(name)), at_most(_INNER)),
        (named({"hidden_size", "n_embd", "d_model"}), lambda value: sizes.new_hidden),
        # word_embed_proj_dim, embedding_size and their like
        (lambda name, value: value == sizes.hidden and name.endswith(("dim", "size")), lambda value: sizes.new_hidden),
    ]
