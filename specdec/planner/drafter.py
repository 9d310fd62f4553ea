"""What each drafter costs: memory, and seconds per step, from its shape or from a measured ratio."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError
from specdec.planner.architecture import Architecture
from specdec.planner.device import Device
from specdec.planner.kv import KvStorage
from specdec.planner.model import read_model
from specdec.planner.names import choose
from specdec.planner.roofline import Part, Phase, Rates
from specdec.planner.speculation import MOST_DRAFT_TOKENS, Seconds
from specdec.planner.weights import Weights
from specdec.planner.work import ModelWork
from specdec.registry import refuse_unknown

_FREE = ("ngram", "suffix", "token_recycling")
_EAGLE3_VOCABULARY = 32_000  # of the published heads
_MEDUSA_HEADS = 5  # of the published heads


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """A drafter beside a target. `seconds(batch, K)` is the least time to draft K tokens for every request."""

    name: str
    context: int
    seconds: Seconds
    weight_bytes: float = 0.0
    kv: KvStorage | None = None  # of its own, never quantised; None = it has none, or works on the target's
    most: int = MOST_DRAFT_TOKENS
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beside:
    """The target, its device and the load that a drafter works under."""

    target: ModelWork
    device: Device
    dtype: str
    context: int


Build = Callable[[Beside, dict[str, Any]], DrafterCost]


def drafter_cost(name: str, beside: Beside, options: dict[str, Any], cost_ratio: float | None) -> DrafterCost:
    """Return what a drafter costs.

    Args:
        name: a registered drafter, a model that drafts, or with a `cost_ratio` any name at all.
        beside: the target and the load.
        options: `model` of draft_model, `num_layers` of early_exit.
        cost_ratio: measured seconds of drafting one token over a target step without drafts, at this batch; it takes
            the place of the computed time.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
        ModelLoadError: the draft model cannot be read.
    """
    if cost_ratio is not None and not 0 <= cost_ratio < float("inf"):
        raise ConfigError(f"cost ratio {cost_ratio}; allowed: at least 0, the cost of a draft token in target steps")
    if name not in _BUILD and cost_ratio is None and ("/" in name or Path(name).exists()):
        head = _head_kind(Path(name).expanduser() / "config.json")
        name, options = (head, options) if head else ("draft_model", {**options, "model": name})
    if name not in _BUILD and cost_ratio is not None:
        found = DrafterCost(name, beside.context, lambda batch, k: 0.0, assumptions=("its memory is not known",))
    else:
        build, allowed = _BUILD[choose("drafter", name, _BUILD, _hints(name))]
        refuse_unknown(f"the planner's drafter {name!r}", options, allowed)
        found = build(beside, options)
    if cost_ratio is None:
        return found
    ratio = cost_ratio

    def measured(batch: int, num_draft_tokens: int) -> float:
        return num_draft_tokens * ratio * beside.target.decode(batch, beside.context).seconds

    return replace(
        found, seconds=measured, assumptions=(*found.assumptions, f"a draft token costs {ratio:g} target steps")
    )


def _head_kind(config: Path) -> str | None:
    """Return which drafter a config.json of a trained head is for, or None if it is none of a head."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
        kind, names = fields.get("kind"), " ".join(fields.get("architectures") or ()).lower()
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    if kind == "eagle":
        return "eagle3" if (fields.get("head") or {}).get("generation") == 3 else "eagle"
    if kind == "medusa" or "medusa_num_heads" in fields:
        return "medusa"
    return "eagle3" if "eagle3" in names else "eagle" if "eagle" in names else None


def _hints(name: str) -> dict[str, str]:
    return {name.strip().lower(): "a drafter of your own needs its measured --cost-ratio;"} if ":" in name else {}


def _none(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    return DrafterCost("none", beside.context, lambda batch, k: 0.0, most=0)


def _free(name: str) -> Build:
    def build(beside: Beside, options: dict[str, Any]) -> DrafterCost:
        free = "looking up tokens takes no time that counts; measure it for small models and give --cost-ratio"
        return DrafterCost(name, beside.context, lambda batch, k: 0.0, assumptions=(free,))

    return build


def _chain(work: ModelWork, context: int) -> Seconds:
    """Return the time of K forwards of one row per request, one after another."""
    return lambda batch, k: k * work.decode(batch, context).seconds


def _draft_model(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    if not options.get("model"):
        raise ConfigError(
            "the draft model is missing; give --drafter-option model=NAME, or the model itself as --drafter "
            "(a directory, a config.json or a hub id)"
        )
    model = read_model(options["model"])
    kv = KvStorage(model.shape, beside.dtype, beside.target.kv.layout)
    work = ModelWork(model, beside.target.weight_bytes, kv, beside.target.rates)
    notes = [f"{model.name} drafts in {beside.dtype}, one forward per draft token, with a cache of its own"]
    if model.shape.vocab_size != beside.target.model.shape.vocab_size:
        notes.append("it has another vocabulary than the target: only shared tokens are drafted, mapping takes time")
    return DrafterCost(
        "draft_model",
        beside.context,
        _chain(work, beside.context),
        weight_bytes=model.weights.total * beside.target.weight_bytes,
        kv=kv,
        assumptions=tuple(notes),
    )


def _self_int8(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    target, weights = beside.target, beside.target.model.weights
    rates = Rates(beside.device.flops_per_s.get("int8", target.rates.flops_per_s), target.rates.bandwidth_bytes_per_s)
    work = replace(target, weight_bytes=1.0, rates=rates)
    copied = weights.dense + weights.experts + weights.output_matrix(target.model.shape)
    return DrafterCost(
        "self_int8",
        beside.context,
        _chain(work, beside.context),
        weight_bytes=float(copied),
        assumptions=("the int8 copy has one byte per weight and reads the target's KV; specdec runs it on CPUs only",),
    )


def _early_exit(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    model = beside.target.model
    shape, weights = model.shape, model.weights
    layers = options.get("num_layers", max(1, shape.num_layers // 4))
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= shape.num_layers:
        raise ConfigError(f"num_layers={layers!r}; allowed: 1 to {shape.num_layers}, the target's layers")
    share = layers / shape.num_layers
    cut = replace(
        model,
        shape=replace(shape, num_layers=layers, windows=shape.windows[:layers]),
        weights=replace(weights, dense=round(weights.dense * share), experts=round(weights.experts * share)),
    )
    work = replace(beside.target, model=cut, kv=replace(beside.target.kv, model=cut.shape))
    note = f"the first {layers} of {shape.num_layers} layers draft, all taken as equally large, over the target's KV"
    return DrafterCost("early_exit", beside.context, _chain(work, beside.context), assumptions=(note,))


def _medusa(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    shape, target = beside.target.model.shape, beside.target
    one = shape.hidden_size * (shape.hidden_size + shape.vocab_size)

    def seconds(batch: int, k: int) -> float:
        return Phase((Part("heads", 2.0 * one * k * batch, one * k * target.weight_bytes),), target.rates).seconds

    return DrafterCost(
        "medusa",
        beside.context,
        seconds,
        weight_bytes=_MEDUSA_HEADS * one * target.weight_bytes,
        most=_MEDUSA_HEADS,
        assumptions=(
            f"{_MEDUSA_HEADS} heads of one hidden layer and an output matrix each, as published; of the tree only its "
            "best chain counts",
        ),
    )


def _eagle(generation: int) -> Build:
    name = "eagle3" if generation == 3 else "eagle"

    def build(beside: Beside, options: dict[str, Any]) -> DrafterCost:
        target = beside.target
        layer = _one_layer(target.model.shape)
        head = target.model.weights.output_matrix(target.model.shape)
        own_head = 0
        if generation == 3:
            own_head = head = min(_EAGLE3_VOCABULARY, layer.vocab_size) * layer.hidden_size
        dense = _eagle_weights(layer, generation)
        weights = Weights(dense, 0, layer.vocab_size * layer.hidden_size, head, "assumed")
        kv = KvStorage(layer, beside.dtype)
        work = ModelWork(replace(target.model, shape=layer, weights=weights), target.weight_bytes, kv, target.rates)
        return DrafterCost(
            name,
            beside.context,
            _chain(work, beside.context),
            weight_bytes=(dense + own_head) * target.weight_bytes,
            kv=kv,
            assumptions=(
                "the head is one dense decoder layer in the target's widths"
                + (
                    f" with an output matrix of {_EAGLE3_VOCABULARY:,} tokens"
                    if own_head
                    else " with its output matrix"
                )
                + "; of a tree only its best chain counts",
            ),
        )

    return build


def _one_layer(shape: Architecture) -> Architecture:
    """Return a plain decoder layer in a target's widths."""
    width = shape.key_dim if shape.latent is None else shape.hidden_size // shape.num_heads
    return replace(
        shape,
        num_layers=1,
        windows=(None,),
        latent=None,
        experts=None,
        key_dim=width,
        value_dim=width,
        tied=False,
    )


def _eagle_weights(layer: Architecture, generation: int) -> int:
    """Return the weights of one decoder layer and of the matrix that fuses the target's hidden states."""
    hidden = layer.hidden_size
    queries, keys = layer.num_heads * layer.key_dim, layer.num_kv_heads * layer.key_dim
    inputs = 2 * hidden if generation == 3 else hidden  # EAGLE-3 attends over embedding and hidden state side by side
    fused = 3 * hidden * hidden if generation == 3 else 2 * hidden * hidden
    return inputs * (queries + 2 * keys) + queries * hidden + 3 * hidden * layer.inner + fused + 4 * hidden


_BUILD: dict[str, tuple[Build, tuple[str, ...]]] = {
    "none": (_none, ()),
    **{name: (_free(name), ()) for name in _FREE},
    "draft_model": (_draft_model, ("model",)),
    "self_int8": (_self_int8, ()),
    "early_exit": (_early_exit, ("num_layers",)),
    "medusa": (_medusa, ()),
    "eagle": (_eagle(1), ()),
    "eagle3": (_eagle(3), ()),
}
