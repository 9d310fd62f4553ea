"""The shape of a decoder, read from the fields of a config.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import ConfigError, UnsupportedModelError
from specdec.models.kv_shape import HEAD_DIMS, HEADS, HIDDEN, kv_shape
from specdec.planner.fields import CHOSEN, EXPERTS, INNER, LAYERS, POSITIONS, Fields
from specdec.planner.silent import Config, complete, split

_RECURRENT_TYPES = (
    *("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba", "zamba2", "recurrent_gemma", "xlstm"),
    *("falcon_h1", "nemotron_h", "granitemoehybrid", "lfm2", "lfm2_moe"),
)
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_ODD_TYPES = {  # what their configs do not say
    "longcat_flash": "attends twice in each layer",
    "mimo_v2_flash": "has more heads of keys and values in layers with a window",
}
# Fields by which layers get keys and values of other widths, or none: what they say, the formulas do not have.
_UNEVEN = ("per_layer_config", "swa_head_dim", "swa_num_key_value_heads", "global_head_dim", "block_configs")


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
    expands_kv: bool = False  # the cache here has keys and values for every query head, not for every group of them
    note: str = ""  # transformers has no class for the model type, so that defaults are not known
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
    def stored_kv_heads(self) -> int:
        """Return how many heads of keys and values this engine's cache holds."""
        return self.num_heads if self.expands_kv else self.num_kv_heads

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
        ConfigError: a field is missing or has a value that is not allowed.
        UnsupportedModelError: it is no decoder whose layers all attend.
    """
    said = split(config, name)
    _refuse(said, said.text)
    Fields(said.text, name).check()
    found, note = complete(said)
    _refuse(said, found)
    fields = Fields(found, name)
    fields.check()
    layers, hidden, heads = (fields.number(*names) for names in (LAYERS, HIDDEN, HEADS))
    latent = _latent(fields)
    if latent is None and fields.first(HEAD_DIMS) is None and hidden % heads:
        raise ConfigError(f"{name}: hidden_size {hidden} is no multiple of {heads} heads, and there is no head_dim")
    kv = kv_shape(found)
    if heads % kv.kv_heads:
        raise ConfigError(f"{name}: {heads} attention heads cannot share {kv.kv_heads} key and value heads evenly")
    return Architecture(
        model_type=str(found.get("model_type") or said.model_type),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv.kv_heads,
        key_dim=kv.key_dim,
        value_dim=kv.value_dim,
        inner=fields.first(INNER) or 4 * hidden,
        vocab_size=fields.number("vocab_size"),
        tied=bool(fields.get("tie_word_embeddings")),
        max_positions=fields.first(POSITIONS),
        windows=_windows(fields, layers),
        latent=latent,
        experts=_experts(fields, layers),
        expands_kv=kv.stored_heads != kv.kv_heads,
        note=note,
        fields=found,
    )


def _refuse(config: Config, fields: dict[str, Any]) -> None:
    name, kind = config.name, config.model_type
    if fields.get("is_encoder_decoder") is True or config.whole.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model ({kind}); only decoders can be planned")
    if fields.get("num_kv_shared_layers") not in (None, 0):
        raise UnsupportedModelError(
            f"{name} ({kind}) shares keys and values between layers, which the planner cannot count"
        )
    if kind in _ODD_TYPES:
        raise UnsupportedModelError(f"{name} ({kind}) {_ODD_TYPES[kind]}, which the planner cannot count")
    uneven = [key for key in _UNEVEN if fields.get(key)]
    if uneven:
        raise UnsupportedModelError(
            f"{name} ({kind}) has layers whose keys and values differ in width ({uneven[0]}), which the planner cannot "
            "count"
        )
    kinds = fields.get("layer_types")
    odd = {str(k) for k in kinds} - _ATTENDING if isinstance(kinds, list | tuple) else set()
    if fields.get("cross_attention_layers"):
        odd = odd | {"cross_attention"}
    if kind in _RECURRENT_TYPES or odd:
        what = f"layers of type {', '.join(sorted(odd))}" if odd else "layers with a recurrent state"
        raise UnsupportedModelError(
            f"{name} ({kind}) has {what}, whose memory and speed the planner has no formula for; it "
            "knows decoders in which every layer attends to keys and values"
        )


def _latent(fields: Fields) -> Latent | None:
    rank = fields.get("kv_lora_rank")
    if rank is None:
        return None
    fields.number("v_head_dim")
    return Latent(
        rank=rank,
        rope_dim=fields.number("qk_rope_head_dim"),
        nope_dim=fields.number("qk_nope_head_dim"),
        query_rank=fields.get("q_lora_rank"),
    )


def _experts(fields: Fields, layers: int) -> Experts | None:
    num = fields.first(EXPERTS)
    if num is None or num <= 1:
        return None
    chosen = fields.number(*CHOSEN)
    if not 1 <= chosen <= num:
        raise ConfigError(f"{fields.name}: {chosen} experts are chosen per token, but there are only {num}")
    inner = fields.first(("moe_intermediate_size", *INNER))
    if inner is None:
        raise ConfigError(f"{fields.name}: its config has experts but no moe_intermediate_size")
    return Experts(num, chosen, _expert_layers(fields, layers), inner, fields.get("n_shared_experts") or 0)


def _expert_layers(fields: Fields, layers: int) -> int:
    """Return how many layers have experts, by what the config classes have for it."""
    listed = fields.get("moe_layers")
    if listed is not None:
        return len({layer for layer in listed if layer < layers})
    dense, first = set(fields.get("mlp_only_layers") or ()), fields.get("first_k_dense_replace") or 0
    step, period = fields.get("decoder_sparse_step"), fields.get("moe_layer_freq") or 1
    having = (i for i in range(first, layers) if i not in dense)
    return sum((i + 1) % step == 0 if step is not None else i % period == 0 for i in having)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: by what the class makes of `layer_types`, else the one window of all layers."""
    window = fields.get("sliding_window") or None
    sizes = {"sliding_attention": window, "chunked_attention": fields.get("attention_chunk_size") or window}
    kinds = fields.get("layer_types")
    if kinds:
        unsized = [kind for kind in sizes if kind in kinds and sizes[kind] is None]
        if unsized and fields.values.get("use_sliding_window") is not False:
            raise ConfigError(f"{fields.name}: its config has layers of type {unsized[0]} but no size of their window")
        return tuple(sizes.get(kind) for kind in kinds)
    local = fields.get("attention_layers")  # of GPT-Neo
    if local:
        return tuple(fields.get("window_size") if kind == "local" else None for kind in local)
    return (window,) * layers
