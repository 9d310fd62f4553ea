"""The shape of a trained head, from its config.json: EAGLE, EAGLE-3, Medusa, or a distilled copy of some layers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.planner.architecture import Architecture

_SHIPPED = Path(__file__).parents[1] / "heads" / "shipped"
_MOST_CONFIG_BYTES = 2**24
_EAGLE3_VOCABULARY = 32_000  # of the published heads
_FUSED = 3  # hidden states, unless the config names their blocks
_MEDUSA_HEADS = 5  # of the published heads


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head's config."""

    source: str
    kind: str | None  # the drafter it is for, as far as its config says one
    fields: dict[str, Any]

    def number(self, default: int, *names: str) -> int:
        """Return the first of these fields that is there, else `default`.

        Raises:
            ConfigError: it is no whole number above 0.
        """
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ConfigError(f"{self.source}: {name} is {value!r}; allowed: a whole number above 0")
                return value
        return default

    def check_target(self, target: Architecture) -> None:
        """Raise IncompatibleDrafterError if the config names another hidden size or vocabulary than the target's."""
        hidden = self.number(target.hidden_size, "target_hidden_size", "hidden_size")
        vocabulary = self.number(target.vocab_size, "vocab_size")
        if (hidden, vocabulary) != (target.hidden_size, target.vocab_size):
            raise IncompatibleDrafterError(
                f"{self.source} was trained for a model of hidden size {hidden:,} and {vocabulary:,} tokens; this one "
                f"has {target.hidden_size:,} and {target.vocab_size:,}. Give a head of this model"
            )


def find_head(source: str | os.PathLike[str]) -> TrainedHead | None:
    """Return the head in a folder, in a config.json, of a shipped name or of a hub id; None where there is no config.

    `kind` is None if the config names no kind of head: then it may be a whole model, or EAGLE-1 as published.
    """
    name = os.fspath(source)
    is_shipped = Path(name).name == name and (_SHIPPED / name / "config.json").is_file()
    path = _SHIPPED / name if is_shipped else local_path(name)
    config = path / "config.json" if path.is_dir() else path
    if not path.exists() and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import hf_hub_download

        try:
            config = Path(hf_hub_download(name, "config.json"))
        except Exception:  # who reads it as a model says what is wrong
            return None
    try:
        if not config.is_file() or config.stat().st_size > _MOST_CONFIG_BYTES:
            return None
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _read(name, fields) if isinstance(fields, dict) else None


def shipped_name(target: str, drafter: str) -> str | None:
    """Return the name of the head or draft model that ships for a built-in target, or None."""
    name = f"{target}-{drafter}"
    return name if Path(name).name == name and (_SHIPPED / name / "config.json").is_file() else None


def local_path(name: str) -> Path:
    """Return the path that a name stands for; one with an unknown user's ~ stands for itself."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _read(source: str, fields: dict[str, Any]) -> TrainedHead:
    if fields.get("format") == "specdec-head" or ("kind" in fields and isinstance(fields.get("head"), dict)):
        kind, head = str(fields.get("kind")), fields.get("head")
        inner = head if isinstance(head, dict) else {}
        if kind == "eagle" and inner.get("generation") == 3:
            kind = "eagle3"
        return TrainedHead(source, kind, {"shares_output": True, **inner})
    layer = fields.get("transformer_layer_config")  # of the package speculators
    whole = fields.get("model")  # EAGLE-1 wrapped for vLLM
    inner = layer if isinstance(layer, dict) else whole if isinstance(whole, dict) else {}
    flat = {**inner, **{key: value for key, value in fields.items() if value is not None}}
    return TrainedHead(source, _kind(fields), flat)


def _kind(fields: dict[str, Any]) -> str | None:
    listed = fields.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    said = " ".join([*names, *(str(fields.get(key, "")) for key in ("model_type", "speculators_model_type", "kind"))])
    said = said.lower()
    if "medusa_num_heads" in fields or "medusa" in said:
        return "medusa"
    return "eagle3" if "eagle3" in said else "eagle" if "eagle" in said else None


@dataclass(frozen=True, slots=True)
class EagleShape:
    """What the arithmetic needs of an EAGLE head."""

    layer: Architecture
    dense: int  # weights that each draft step reads
    fused: int  # of the matrix that fuses hidden states, applied once before the draft steps; 0 for EAGLE-1
    output: int  # of the output matrix
    own_output: bool  # it is not the target's


def eagle_shape(generation: int, target: Architecture, head: TrainedHead | None) -> EagleShape:
    """Return the shape of a head, or without one that of published heads: a decoder layer in the target's widths."""
    named = head or TrainedHead("", None, {})
    named.check_target(target)
    hidden = named.number(target.hidden_size, "hidden_size")
    heads = named.number(target.num_heads, "num_heads", "num_attention_heads")
    kv_heads = named.number(target.num_kv_heads, "num_kv_heads", "num_key_value_heads")
    width = target.key_dim if target.latent is None else target.hidden_size // target.num_heads
    if head is not None and ("num_heads" in named.fields or "num_attention_heads" in named.fields):
        width = max(1, hidden // heads)
    width = named.number(width, "head_dim")
    layers = named.number(1, "num_layers", "num_hidden_layers")
    inner = named.number(target.inner, "intermediate_size")
    shares = "shares_output" in named.fields
    vocabulary = target.vocab_size if head or generation == 1 else min(_EAGLE3_VOCABULARY, target.vocab_size)
    rows = named.number(vocabulary, "draft_vocab_size", "truncated_vocab_size")
    listed = named.fields.get("feature_layers") or named.fields.get("eagle_aux_hidden_state_layer_ids")
    fused = (len(listed) if isinstance(listed, list) else _FUSED) * target.hidden_size * hidden
    # EAGLE-3's first layer attends over embedding and hidden state side by side; EAGLE-1 fuses them in each step.
    inputs = hidden * (layers + (generation == 3))
    dense = inputs * (heads + 2 * kv_heads) * width
    dense += layers * (heads * width * hidden + 3 * hidden * inner + 2 * hidden)
    dense += 2 * hidden if generation == 3 else 2 * hidden * hidden
    own = rows != target.vocab_size  # published EAGLE-3 heads have rows of their own whatever their number
    own = own or (generation == 3 and (head is None or "draft_vocab_size" in named.fields) and not shares)
    return EagleShape(
        layer=Architecture(
            model_type=target.model_type,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            key_dim=width,
            value_dim=width,
            inner=inner,
            vocab_size=target.vocab_size,
            tied=False,
            windows=(None,) * layers,
        ),
        dense=dense,
        fused=fused if generation == 3 else 0,
        output=rows * hidden,
        own_output=own,
    )


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """What the arithmetic needs of Medusa heads."""

    num_heads: int
    blocks: int  # weights of one head's residual blocks
    output: int  # of one output matrix
    own_heads: bool  # each head has an output matrix; else they share one
    own_output: bool  # that one is not the target's


def medusa_shape(target: Architecture, head: TrainedHead | None) -> MedusaShape:
    """Return the shape of heads, or without any that of published ones."""
    named = head or TrainedHead("", None, {})
    named.check_target(target)
    if head is not None and not {"medusa_num_heads", "num_heads"} & set(named.fields):
        raise ConfigError(f"{named.source} says nothing of how many Medusa heads it has: medusa_num_heads or num_heads")
    rows = named.number(target.vocab_size, "draft_vocab_size", "truncated_vocab_size")
    own_heads = bool(named.fields.get("own_heads", "shares_output" not in named.fields))
    if named.fields.get("original_lm_head"):  # vLLM's word for it
        own_heads = False
    # vLLM's and our own words; a whole model with heads inside has its own layers in num_hidden_layers.
    names = ("num_layers", "num_hidden_layers") if "num_heads" in named.fields else ("medusa_num_layers",)
    blocks = 0 if named.fields.get(names[0]) == 0 else named.number(1, *names)
    return MedusaShape(
        num_heads=named.number(_MEDUSA_HEADS, "medusa_num_heads", "num_heads"),
        blocks=blocks * target.hidden_size**2,
        output=rows * target.hidden_size,
        own_heads=own_heads,
        own_output=own_heads or rows != target.vocab_size,
    )
