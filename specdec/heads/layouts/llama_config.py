"""A llama-like config of one decoder layer, as every EAGLE checkpoint has it, in the fields of `EagleConfig`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specdec.errors import CheckpointError, IncompatibleDrafterError
from specdec.heads.config_fields import ConfigFields
from specdec.heads.layouts.vocabulary_maps import check_vocab_size
from specdec.heads.target import HeadTarget

_FIRST = "layers.0.self_attn."
_UNPERSISTED = "rotary_emb.inv_freq"  # a buffer that old versions of transformers wrote


def decoder_options(fields: ConfigFields, names: Collection[str], target: HeadTarget) -> dict[str, Any]:
    """Return the options of `EagleConfig` that describe the decoder layer.

    Layouts disagree about the defaults of flags. What the config says holds, and then tensors that contradict it are
    missing or unexpected; where it says nothing, the tensors decide.

    Args:
        fields: the config.
        names: of the tensors, as our module calls them.
        target: the head's target.

    Raises:
        CheckpointError: a field is missing, of the wrong kind, or asks for what is not supported.
        IncompatibleDrafterError: the head is for another number of tokens.
    """
    check_vocab_size(fields.integer("vocab_size", target.vocab_size), target, f"{fields.where} (vocab_size)")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    _refuse_windows(fields)
    bias = "qkv_bias" if "qkv_bias" in fields else "attention_bias"
    return {
        "hidden_size": hidden,
        "vocab_size": target.vocab_size,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", max(hidden // heads, 1)),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers", 1),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_parameters": rope_parameters(fields),
        "max_positions": fields.integer("max_position_embeddings", 2048),
        "hidden_act": fields.text("hidden_act", "silu"),
        "attention_bias": fields.flag(bias, _FIRST + "q_proj.bias" in names),
        "output_bias": _FIRST + "o_proj.bias" in names,
        "mlp_bias": fields.flag("mlp_bias", "layers.0.mlp.gate_proj.bias" in names),
        "qk_norm": _FIRST + "q_norm.weight" in names or fields.text("model_type", "") == "qwen3",
    }


def rope_parameters(fields: ConfigFields) -> dict[str, Any]:
    """Return the rotary parameters, whichever version of transformers wrote the config."""
    found = dict(fields.inner("rope_parameters").values) or dict(fields.inner("rope_scaling").values)
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    found.setdefault("rope_theta", fields.number("rope_theta", 10000.0))
    if found.pop("mrope_section", None) is not None:  # of images: in text all its position ids are the same
        found["rope_type"] = "default"
    share = found.get("partial_rotary_factor") or fields.number("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise CheckpointError(f"{fields.where}: partial_rotary_factor={share}; allowed in a head: 1")
    return found


def check_hidden_size(found: int, target: HeadTarget, what: str) -> None:
    """Raise IncompatibleDrafterError unless a head reads hidden states of its target's width."""
    if found != target.hidden_size:
        raise IncompatibleDrafterError(
            f"{what}={found} and the hidden size of {target.name} is {target.hidden_size}; the head was trained for "
            "another model"
        )


def plain_names(names: Collection[str], prefix: str = "model.") -> dict[str, str]:
    """Return name without any `prefix` -> name in the file, without buffers that are computed anew.

    Raises:
        CheckpointError: two tensors have one name then.
    """
    found: dict[str, str] = {}
    for name in names:
        plain = name
        while plain.startswith(prefix):
            plain = plain.removeprefix(prefix)
        if plain.endswith(_UNPERSISTED):
            continue
        if plain in found:
            raise CheckpointError(f"{found[plain]} and {name} are both in the file, and are one tensor of a head")
        found[plain] = name
    return found


def _refuse_windows(fields: ConfigFields) -> None:
    if "sliding_attention" in fields.texts("layer_types"):
        raise CheckpointError(f"{fields.where}: layer_types has sliding_attention, which is not supported in a head")
