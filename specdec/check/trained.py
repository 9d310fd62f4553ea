"""Whose a trained drafter is, as far as it is known of a target that is not loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.errors import SpecdecError
from specdec.heads.saving import FORMAT
from specdec.heads.shipped_heads import shipped_config, shipped_names, shipped_of_sizes, why_none_ships
from specdec.heads.target import probe_ids, probe_of, same_probe
from specdec.heads.weight_files import WeightFiles
from specdec.heads.writing import CONFIG
from specdec.models.builtin import BUILTIN_MODELS
from specdec.models.checkpoint import read_json
from specdec.models.described import Described

SHIPPED_KINDS = ("eagle", "eagle3", "medusa")  # these need a checkpoint, and one may ship
UNSURE = "is for {}, which has this model's sizes; whether it is that model shows when its weights are loaded"


@dataclass(frozen=True, slots=True)
class Shipped:
    """The drafter of one kind that ships for a model, or why there is none."""

    name: str | None = None
    reason: str | None = None
    note: str = ""


def shipped_drafter(kind: str, found: Described) -> Shipped:
    """Return the shipped drafter of this kind that is a model's.

    Args:
        kind: the drafter's registered name.
        found: the target, with a config.
    """
    hidden_size, vocab_size = sizes_of_target(found)
    for name, trained_for in shipped_of_sizes(kind, hidden_size or 0, vocab_size or 0).items():
        fits = is_target(found, trained_for)
        if fits is None:
            return Shipped(name, note=f"{name} {UNSURE.format(trained_for['name'])}")
        if fits:
            return Shipped(name)
    return Shipped(reason=why_none_ships(kind, found.name, hidden_size, vocab_size))


def trained_config(draft: object) -> dict[str, Any] | None:
    """Return the config.json of a trained drafter in specdec's own layout that a user names; None = no such thing."""
    if not isinstance(draft, str | os.PathLike):
        return None
    name = os.fspath(draft)
    path = Path(name).expanduser() / CONFIG
    if not path.is_file():
        return shipped_config(name) if name in shipped_names() else None
    try:
        config = read_json(path)
    except SpecdecError:  # whoever then wants it as a model says what is wrong with it
        return None
    return config if config.get("format") == FORMAT else None


def is_target(found: Described, trained_for: Mapping[str, Any]) -> bool | None:
    """Tell whether a drafter was trained for a model; None: the sizes are the same and no weights are at hand.

    Args:
        found: the model.
        trained_for: what the drafter's config.json says of its target: name, hidden_size, vocab_size, probe.
    """
    if sizes_of_target(found) != (trained_for["hidden_size"], trained_for["vocab_size"]):
        return False
    builtin = BUILTIN_MODELS.get(trained_for["name"])
    if builtin is not None and found.source is not None and found.source.name in (builtin.name, builtin.hub_id):
        return True
    probe = _probe(found, trained_for["vocab_size"])
    return None if probe is None else same_probe(probe, trained_for["probe"])


def sizes_of_target(found: Described) -> tuple[int | None, int | None]:
    """Return hidden size and tokens as the config has them."""
    text = found.config.get_text_config()
    return getattr(text, "hidden_size", None), getattr(text, "vocab_size", None)


def _probe(found: Described, vocab_size: int) -> list[float] | None:
    """Return the probe of the model's embedding where its weights are in memory or in a local folder."""
    ids = probe_ids(vocab_size)
    try:
        if found.model is not None:
            embedding = found.model.get_input_embeddings()
            with torch.no_grad():
                return probe_of(embedding(ids.to(embedding.weight.device)))
        if found.source is None or found.source.folder is None:
            return None
        weights = WeightFiles(found.source.folder)
        name = next(n for n in weights.shapes if n.endswith(("embed_tokens.weight", "wte.weight")))
        return probe_of(weights.rows(name, ids))
    except (SpecdecError, StopIteration, AttributeError, RuntimeError):  # none there, offloaded or of another layout
        return None
