"""How many weights a decoder has, told apart by how often a step reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdec.planner.architecture import Architecture

PARTS = ("dense", "experts", "embedding", "head")


@dataclass(frozen=True, slots=True)
class Packed:
    """Bytes of one weight of each part of a quantised checkpoint, scales included; None = as the number format."""

    dense: float | None = None
    experts: float | None = None
    embedding: float | None = None
    head: float | None = None

    def bits(self) -> dict[str, float] | None:
        """Return the bits of a weight of the parts that are quantised, None if there are none."""
        sizes = {part: getattr(self, part) for part in PARTS}
        return {part: 8 * size for part, size in sizes.items() if size is not None} or None

    def said(self, weights: Weights) -> str:
        """Return the parts and their bits in words."""
        names = {"dense": "dense layers", "experts": "experts", "embedding": "embedding", "head": "output matrix"}
        bits = {names[part]: bits for part, bits in (self.bits() or {}).items() if getattr(weights, part)}
        return ", ".join(f"{part} in {bit:.2f} bits a weight" for part, bit in bits.items())


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of weights. Tied matrices count once, as the embedding."""

    dense: int  # read by every step: attention, dense and shared feed-forward layers, routers, norms
    experts: int  # of all routed experts: a step reads those that its tokens chose
    embedding: int  # a step reads one row per token
    head: int  # the output matrix; 0 where it is the embedding
    source: str  # how they were counted
    packed: Packed = Packed()  # how a quantised checkpoint stores them

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.embedding + self.head

    def bytes_each(self, part: str, plain: float) -> float:
        """Return the bytes of one weight of a part.

        Args:
            part: one of `PARTS`.
            plain: bytes of a weight that is not quantised.
        """
        packed: float | None = getattr(self.packed, part)
        return plain if packed is None else packed

    def num_bytes(self, plain: float) -> float:
        """Return the bytes that all weights take."""
        return sum(getattr(self, part) * self.bytes_each(part, plain) for part in PARTS)

    def output_bytes_each(self, plain: float) -> float:
        """Return the bytes of one weight of the output matrix, which may be the embedding."""
        return self.bytes_each("head" if self.head else "embedding", plain)

    def output_matrix(self, model: Architecture) -> int:
        """Return the weights that one row of logits multiplies."""
        return self.head or min(self.embedding, model.vocab_size * model.hidden_size)  # OPT-350m embeds narrower


@dataclass(frozen=True, slots=True)
class _Family:
    """What sets one model type apart from Llama, as far as counting goes."""

    norms: int = 2  # per layer, of the hidden size
    query_norm: str = ""  # "head": two norms per head's width; "all": over all heads
    qkv_bias: bool = False  # unless the config says otherwise
    mlp_bias_field: str = "mlp_bias"


# Model types whose weights the formulas below give exactly; tests compare them with transformers' own classes.
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "gemma", "phi3", "granite", "smollm3"), _Family()),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(query_norm="head"),
    "qwen3_moe": _Family(query_norm="head"),
    "gemma2": _Family(norms=4),
    "gemma3_text": _Family(norms=4, query_norm="head"),
    "olmo2": _Family(query_norm="all"),
    "deepseek_v2": _Family(),
    "deepseek_v3": _Family(),
}


def counted_families() -> tuple[str, ...]:
    """Return the model types that are counted by formula."""
    return tuple(_FAMILIES)


def count_by_formula(model: Architecture) -> Weights | None:
    """Return the weights by this file's formulas, or None for a model type they are not known to fit."""
    family = _FAMILIES.get(model.model_type)
    if family is None:
        return None
    dense_layers = model.num_layers - (model.experts.num_layers if model.experts else 0)
    per_layer = _attention(model, family) + family.norms * model.hidden_size
    dense = model.num_layers * per_layer + dense_layers * _mlp(model, model.inner, family) + model.hidden_size
    routed = 0
    if model.experts is not None:
        experts, one = model.experts, 3 * model.hidden_size * model.experts.inner
        dense += experts.num_layers * (model.hidden_size * experts.num + experts.num_shared * one)
        routed = experts.num_layers * experts.num * one
    embedding = model.vocab_size * model.hidden_size
    return Weights(dense, routed, embedding, 0 if model.tied else embedding, "formula")


def _attention(model: Architecture, family: _Family) -> int:
    hidden, heads = model.hidden_size, model.num_heads
    if model.latent is not None:
        latent = model.latent
        wide = heads * model.key_dim
        queries = hidden * wide if latent.query_rank is None else latent.query_rank * (hidden + 1 + wide)
        down = hidden * (latent.rank + latent.rope_dim) + latent.rank
        up = latent.rank * heads * (latent.nope_dim + model.value_dim)
        biases = (latent.query_rank or 0) + latent.rank + latent.rope_dim + hidden
        bias = biases if model.fields.get("attention_bias") else 0
        return queries + down + up + heads * model.value_dim * hidden + bias
    queries, keys = heads * model.key_dim, model.num_kv_heads * model.key_dim
    count = hidden * (2 * queries + 2 * keys)
    if family.qkv_bias:
        count += queries + 2 * keys
    elif model.fields.get("attention_bias"):
        count += queries + 2 * keys + hidden
    return count + {"": 0, "head": 2 * model.key_dim, "all": queries + keys}[family.query_norm]


def _mlp(model: Architecture, inner: int, family: _Family) -> int:
    bias = 2 * inner + model.hidden_size if model.fields.get(family.mlp_bias_field) else 0
    return 3 * model.hidden_size * inner + bias


def count_by_name(parameters: Iterable[tuple[str, int]], source: str) -> Weights:
    """Return the weights of named parameters, told apart by their names.

    Args:
        parameters: (name, number of weights) of each, tied ones once.
        source: what the result says of where they are from.
    """
    counts = dict.fromkeys(PARTS, 0)
    for name, number in parameters:
        counts[part_of(name)] += number
    return Weights(counts["dense"], counts["experts"], counts["embedding"], counts["head"], source)


_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "tok_embeddings", "embed_positions")
_HEADS = ("lm_head", "embed_out", "output_layer")
_ROUTERS = {"router", "gate"}
_GROUPED = {"input_linear", "output_linear"}  # of Granite's and JetMoE's experts


def part_of(name: str) -> str:
    """Return which of `PARTS` a parameter belongs to."""
    parts = name.split(".")
    if "experts" in parts and not _ROUTERS & set(parts):
        return "experts"
    if _GROUPED & set(parts) and not any("shared" in part for part in parts):
        return "experts"
    if any(part in _EMBEDDINGS for part in parts):
        return "embedding"
    return "head" if any(part in _HEADS for part in parts) or name == "output.weight" else "dense"
