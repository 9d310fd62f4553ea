"""How many numbers a token's keys and values are in one layer: the one formula, from a config's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "n_head_kv")
HEAD_DIMS = ("head_dim", "kv_channels", "attention_head_dim", "dim_head")


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token in one layer."""

    kv_heads: int  # as the architecture has them
    stored_heads: int  # as this engine's cache has them
    key_dim: int  # per head
    value_dim: int

    @property
    def values_per_token(self) -> int:
        """Return the numbers that the cache stores in a layer."""
        return self.stored_heads * (self.key_dim + self.value_dim)


def first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first of the named fields that says something, or None."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def kv_shape(fields: Mapping[str, Any]) -> KvShape:
    """Return the keys and values that the fields of a text config describe; they are taken to be valid numbers.

    Falcon's new decoder gives a group's keys and values to every query head before they are cached, and latent
    attention its expanded ones: the cache, like transformers', holds what the model hands it.

    Raises:
        KeyError: there is no number of heads, or no hidden size where one is needed.
    """
    heads = first(fields, HEADS)
    if heads is None:
        raise KeyError(HEADS[0])
    if fields.get("kv_lora_rank"):
        key = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        return KvShape(heads, heads, key, fields["v_head_dim"])
    expands = bool(fields.get("new_decoder_architecture"))
    kv_heads = 1 if fields.get("multi_query") and not expands else first(fields, KV_HEADS) or heads
    width = first(fields, HEAD_DIMS)
    if width is None:
        hidden = first(fields, HIDDEN)
        if hidden is None:
            raise KeyError(HIDDEN[0])
        width = hidden // heads
    return KvShape(kv_heads, heads if expands else kv_heads, width, fields.get("v_head_dim") or width)
