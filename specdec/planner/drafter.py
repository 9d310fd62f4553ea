"""What each drafter costs: memory, and seconds per step, from its shape or from a measured ratio."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.planner.kv import KvStorage
from specdec.planner.model import read_model
from specdec.planner.names import choose
from specdec.planner.roofline import Part, Phase
from specdec.planner.speculation import MOST_DRAFT_TOKENS, Seconds
from specdec.planner.trained_head import TrainedHead, eagle_shape, find_head, local_path, medusa_shape, shipped_name
from specdec.planner.weights import Packed, Weights
from specdec.planner.work import ModelWork
from specdec.registry import DRAFTERS, refuse_unknown

_FREE = ("ngram", "suffix", "token_recycling")


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """A drafter beside a target. `seconds(batch, K)` is the least time to draft K tokens for every request."""

    name: str
    seconds: Seconds
    weight_bytes: float = 0.0
    kv: KvStorage | None = None  # of its own, never quantised; None = it has none, or works on the target's
    most: int = MOST_DRAFT_TOKENS
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beside:
    """The target and the load that a drafter works under."""

    target: ModelWork
    dtype: str
    context: int


Build = Callable[[Beside, dict[str, Any]], DrafterCost]


def drafter_cost(name: str, beside: Beside, options: dict[str, Any], cost_ratio: float | None) -> DrafterCost:
    """Return what a drafter costs.

    Args:
        name: a registered drafter; a trained head or a model that drafts (a directory, a config.json, a hub id); with
            a `cost_ratio` also a drafter of the user's own.
        beside: the target and the load.
        options: `model` of draft_model and of trained heads, `num_layers` of early_exit.
        cost_ratio: measured seconds of drafting one token over a target step without drafts, at this batch; it takes
            the place of the computed time, and of that alone.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
        IncompatibleDrafterError: a trained head is another model's or another drafter's.
        ModelLoadError: the draft model cannot be read.
    """
    found = _computed(name, beside, options, has_ratio=cost_ratio is not None)
    if cost_ratio is None or found.most == 0:
        return found
    ratio = cost_ratio

    def measured(batch: int, num_draft_tokens: int) -> float:
        return num_draft_tokens * ratio * beside.target.decode(batch, beside.context).seconds

    return replace(
        found, seconds=measured, assumptions=(*found.assumptions, f"a draft token costs {ratio:g} target steps")
    )


def _computed(name: str, beside: Beside, options: dict[str, Any], has_ratio: bool) -> DrafterCost:
    if name.strip() and name not in _BUILD and ":" not in name:
        head = find_head(name)
        kind = head.kind if head is not None and head.kind in _BUILD else None
        if kind is None and (local_path(name).exists() or "/" in name):
            kind = "draft_model"
        if kind is not None:
            if "model" in options:
                raise ConfigError(f"drafter {name!r} is a model or head itself, and model={options['model']!r} another")
            name, options = kind, {**options, "model": name}
    if name not in _BUILD and has_ratio:
        return _own(name, options)
    build, allowed = _BUILD[choose("drafter", name, _BUILD, _hints(name))]
    shipped = shipped_name(beside.target.model.name, name)
    if "model" in allowed and "model" not in options and shipped is not None:
        options = {**options, "model": shipped}  # as the drafter itself takes it
    refuse_unknown(f"the planner's drafter {name!r}", options, allowed)
    return build(beside, options)


def _own(name: str, options: dict[str, Any]) -> DrafterCost:
    """Return the cost of a drafter of which nothing but its measured ratio is known."""
    if ":" not in name:
        choose("drafter", name, sorted({*_BUILD, *DRAFTERS.names()}))
    refuse_unknown(f"drafter {name!r}, of which the planner knows nothing but its cost ratio,", options, ())
    return DrafterCost(name, lambda batch, k: 0.0, assumptions=(f"the memory that {name} takes is not known",))


def _hints(name: str) -> dict[str, str]:
    other = ":" in name or name in DRAFTERS.names()
    return {name.strip().lower(): "for any other drafter give its measured --cost-ratio;"} if other else {}


def _none(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    return DrafterCost("none", lambda batch, k: 0.0, most=0)


def _free(name: str) -> Build:
    def build(beside: Beside, options: dict[str, Any]) -> DrafterCost:
        free = "looking up tokens takes no time that counts; measure it for small models and give --cost-ratio"
        return DrafterCost(name, lambda batch, k: 0.0, assumptions=(free,))

    return build


def _chain(work: ModelWork, context: int) -> Seconds:
    """Return the time of K forwards of one row per request, one after another."""
    return lambda batch, k: k * work.decode(batch, context).seconds


def _draft_model(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    given = options.get("model")
    if given is None or given == "":
        raise ConfigError(
            "the draft model is missing; give --drafter-option model=NAME, or the model itself as --drafter "
            "(a directory, a config.json or a hub id)"
        )
    _check_source(given, dict)
    head = None if isinstance(given, dict) else find_head(given)
    if head is not None and head.kind == "draft_model":
        return _distilled(beside, head)
    if head is not None and head.kind is not None:
        raise IncompatibleDrafterError(f"{head.source} is a trained head for --drafter {head.kind}; use that one")
    model = read_model(given)
    kv = KvStorage(model.shape, beside.dtype, beside.target.kv.layout)
    work = ModelWork(model, beside.target.weight_bytes, kv, beside.target.rates).expected()
    notes = [f"{model.name} drafts in {beside.dtype}, one forward per draft token, with a cache of its own"]
    if model.shape.vocab_size != beside.target.model.shape.vocab_size:
        notes.append("it has another vocabulary than the target: only shared tokens are drafted, mapping takes time")
    return DrafterCost(
        "draft_model",
        _chain(work, beside.context),
        weight_bytes=model.weights.num_bytes(beside.target.weight_bytes),
        kv=kv,
        assumptions=tuple(notes),
    )


def _check_source(given: Any, *also: type) -> None:
    if not isinstance(given, (str, os.PathLike, *also)):
        raise ConfigError(
            f"model={given!r} is no name of a model; allowed: a directory, a config.json or a hub id, as a text"
        )


def _distilled(beside: Beside, head: TrainedHead) -> DrafterCost:
    shape = beside.target.model.shape
    layers = head.fields.get("layers")
    count = len(layers) if isinstance(layers, list) else 0
    if not 1 <= count <= shape.num_layers:
        raise ConfigError(f"{head.source}: layers is {layers!r}; allowed: a list of 1 to {shape.num_layers} blocks")
    work = _first_layers(_unpacked(beside.target), count)  # trained copies, whatever the target is stored in
    kv = KvStorage(work.model.shape, beside.dtype, beside.target.kv.layout)
    own = work.model.weights.dense + work.model.weights.experts
    return DrafterCost(
        "draft_model",
        _chain(replace(work, kv=kv), beside.context),
        weight_bytes=own * beside.target.weight_bytes,
        kv=kv,
        assumptions=(
            f"{head.source}: {count} of {shape.num_layers} layers, all taken as equally large, and the target's output "
            "matrix, with a cache of its own",
        ),
    )


def _self_int8(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    target, weights = beside.target, beside.target.model.weights
    copied = weights.dense + weights.experts + weights.output_matrix(target.model.shape)
    return DrafterCost(
        "self_int8",
        _chain(replace(_unpacked(target), weight_bytes=1.0), beside.context),
        weight_bytes=float(copied),
        assumptions=(f"the int8 copy has one byte per weight, computes at the rate of {beside.dtype} and reads the "
                     "target's KV",),
    )  # fmt: skip


def _early_exit(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    shape = beside.target.model.shape
    layers = options.get("num_layers")
    if layers is None:
        layers = max(1, shape.num_layers // 4)
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= shape.num_layers:
        raise ConfigError(f"num_layers={layers!r}; allowed: 1 to {shape.num_layers}, the target's layers")
    note = f"the first {layers} of {shape.num_layers} layers draft, all taken as equally large, over the target's KV"
    return DrafterCost("early_exit", _chain(_first_layers(beside.target, layers), beside.context), assumptions=(note,))


def _unpacked(target: ModelWork) -> ModelWork:
    """Return a target's work with weights that are not quantised."""
    model = target.model
    return replace(target, model=replace(model, weights=replace(model.weights, packed=Packed())))


def _first_layers(target: ModelWork, layers: int) -> ModelWork:
    """Return the work of a target's first layers and its output matrix."""
    model, shape, weights = target.model, target.model.shape, target.model.weights
    share = layers / shape.num_layers
    cut = replace(
        model,
        shape=replace(shape, num_layers=layers, windows=shape.windows[:layers]),
        weights=replace(weights, dense=round(weights.dense * share), experts=round(weights.experts * share)),
    )
    return replace(target, model=cut, kv=replace(target.kv, model=cut.shape))


def _head_option(name: str, options: dict[str, Any]) -> TrainedHead | None:
    """Return the head that the option `model` names."""
    given = options.get("model")
    if given is None:
        return None
    _check_source(given)
    head = find_head(given)
    if head is None:
        raise ConfigError(f"model={given!r} is no trained head: there is no config.json that can be read")
    if head.kind not in (None, name):
        raise IncompatibleDrafterError(f"{head.source} is for --drafter {head.kind}, not {name}; use that one")
    return head


def _medusa(beside: Beside, options: dict[str, Any]) -> DrafterCost:
    target, head = beside.target, _head_option("medusa", options)
    shape = medusa_shape(target.model.shape, head)
    each, whole = (shape.blocks + shape.output, 0) if shape.own_heads else (shape.blocks, shape.output)

    def seconds(batch: int, k: int) -> float:
        flops = 2.0 * (shape.blocks + shape.output) * k * batch
        return Phase((Part("heads", flops, (each * k + whole) * target.weight_bytes),), target.rates).seconds

    stored = each * shape.num_heads + (whole if shape.own_output else 0)
    what = f"{shape.num_heads} heads " + ("with an output matrix each" if shape.own_heads else "and one output matrix")
    source = f"{head.source}: {what}" if head else f"{what}, as published"
    return DrafterCost(
        "medusa",
        seconds,
        weight_bytes=stored * target.weight_bytes,
        most=min(shape.num_heads, MOST_DRAFT_TOKENS),
        assumptions=(f"{source}; of the tree only its best chain counts",),
    )


def _eagle(generation: int) -> Build:
    name = "eagle3" if generation == 3 else "eagle"

    def build(beside: Beside, options: dict[str, Any]) -> DrafterCost:
        target, head = beside.target, _head_option(name, options)
        shape = eagle_shape(generation, target.model.shape, head)
        layer = shape.layer
        weights = Weights(shape.dense, 0, layer.vocab_size * layer.hidden_size, shape.output, "assumed")
        kv = KvStorage(layer, beside.dtype)
        model = replace(target.model, shape=layer, weights=weights)
        step = _chain(ModelWork(model, target.weight_bytes, kv, target.rates), beside.context)

        def seconds(batch: int, k: int) -> float:
            fuse = Part("fuse", 2.0 * shape.fused * batch, shape.fused * target.weight_bytes)
            return Phase((fuse,), target.rates).seconds + step(batch, k)

        rows = shape.output // layer.hidden_size
        output = f"an output matrix of {rows:,} tokens" if shape.own_output else "the target's output matrix"
        source = head.source if head else "the head is in the target's widths"
        return DrafterCost(
            name,
            seconds,
            weight_bytes=(shape.dense + shape.fused + shape.output * shape.own_output) * target.weight_bytes,
            kv=kv,
            assumptions=(
                f"{source}: {layer.num_layers} dense decoder layer{'s' * (layer.num_layers > 1)} with {output}; of a "
                "tree only its best chain counts",
            ),
        )

    return build


_BUILD: dict[str, tuple[Build, tuple[str, ...]]] = {
    "none": (_none, ()),
    **{name: (_free(name), ()) for name in _FREE},
    "draft_model": (_draft_model, ("model",)),
    "self_int8": (_self_int8, ()),
    "early_exit": (_early_exit, ("num_layers",)),
    "medusa": (_medusa, ("model",)),
    "eagle": (_eagle(1), ("model",)),
    "eagle3": (_eagle(3), ("model",)),
}
