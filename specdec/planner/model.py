"""From what a user names as a model to its shape and its number of weights, without loading any."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.errors import ModelLoadError, UnsupportedModelError
from specdec.models.builtin import BUILTIN_MODELS, builtin_file
from specdec.planner.architecture import Architecture, read_architecture
from specdec.planner.names import WEIGHT_BYTES, canonical
from specdec.planner.quantised import Quantisation, packed_by_files, quantisation_of
from specdec.planner.stored import Stored, gguf_config, read_stored
from specdec.planner.tensors import of_decoder
from specdec.planner.weights import Weights, count_by_formula, count_by_name

_MOST_CONFIG_BYTES = 2**24
_MISMATCH = 0.01  # of weights, from which on a directory's files are not those of its config


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A decoder as the planner sees it."""

    name: str
    shape: Architecture
    weights: Weights
    dtype: str | None = None  # of the checkpoint, as far as it is known
    stored: Stored | None = None  # what the files at hand hold
    notes: tuple[str, ...] = ()

    @property
    def num_active(self) -> int:
        """Return the weights of one token's way, the whole embedding included as published counts have it."""
        return self.weights.total - self.weights.experts + round(self.weights.experts * self.chosen_share)

    @property
    def chosen_share(self) -> float:
        experts = self.shape.experts
        return experts.chosen / experts.num if experts else 0.0


def read_model(target: str | os.PathLike[str] | dict[str, Any], name: str | None = None) -> PlannedModel:
    """Return the model behind a built-in name, a directory, a config.json, a .gguf file, a hub id or a config's fields.

    Of a hub id only config.json is downloaded.

    Raises:
        ModelLoadError: there is no such thing, or it cannot be read.
        ConfigError: a field is missing or no number.
        UnsupportedModelError: the planner has no arithmetic for it.
    """
    if isinstance(target, dict):
        return _planned(name or str(target.get("model_type", "config")), target, None)
    spelled = os.fspath(target)
    name = name or spelled
    if spelled in BUILTIN_MODELS:
        return _from_gguf(name, builtin_file(BUILTIN_MODELS[spelled]))
    path = Path(spelled).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = sorted(path.glob("*.gguf"))
            hint = f"; it holds {ggufs[0].name}: give the path of that file" if ggufs else ""
            raise ModelLoadError(f"{name} is no model directory: there is no config.json in it{hint}")
        return _planned(name, _read(path / "config.json", name), read_stored(path))
    if path.is_file():
        return _from_gguf(name, path) if path.suffix.lower() == ".gguf" else _planned(name, _read(path, name), None)
    return _planned(name, _read(_download(spelled), name), None)


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise ModelLoadError(f"{path} has {path.stat().st_size:,} bytes, which no config.json has; give that file")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or numbers without end
        raise ModelLoadError(f"{path} of {name} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{path} of {name} holds a {type(fields).__name__}, not the fields of a config")
    return fields


def _download(name: str) -> Path:
    """Return the config.json of a hub id, downloaded or from the hub's cache."""
    choices = f"built-in models: {', '.join(BUILTIN_MODELS)}; or give a directory, a config.json, a .gguf or a hub id"
    if not name.strip() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        import difflib

        close = difflib.get_close_matches(name, BUILTIN_MODELS, n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ModelLoadError(f"there is no file, directory or model {name!r};{hint} {choices}")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # the hub, its cache and the network raise their own kinds
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ModelLoadError(
            f"{name!r} is no local path, and its config.json cannot be had from the Hugging Face Hub: {reason}"
        ) from error


def _from_gguf(name: str, path: Path) -> PlannedModel:
    fields, stored = gguf_config(path)
    return _planned(name, fields, stored)


def _planned(name: str, fields: dict[str, Any], stored: Stored | None) -> PlannedModel:
    shape = read_architecture(fields, name)
    notes = [shape.note] if shape.note else []
    quantised = quantisation_of(fields, _text_of(fields), name)
    tensors = of_decoder(stored.tensors, shape) if stored is not None else []
    of_files = count_by_name(((t.name, t.count) for t in tensors), "the files' headers") if tensors else None
    weights = count_by_formula(shape)
    if weights is None and of_files is not None and quantised is None:
        weights = of_files
    if weights is None:
        weights = _by_transformers(shape, fields, name)
    if shape.experts is None:  # one expert that all tokens take
        weights = replace(weights, dense=weights.dense + weights.experts, experts=0)
    elif not weights.experts:  # fields of experts that its class does not use
        shape = replace(shape, experts=None)
    if stored is not None and stored.note:
        notes.append(stored.note)
    if quantised is not None:
        packed = packed_by_files(tensors, weights) if tensors else quantised.packed(weights)
        weights = replace(weights, packed=packed)
        notes.append(_of_quantised(quantised, weights, bool(tensors)))
    elif of_files is not None and abs(of_files.total / weights.total - 1) > _MISMATCH:
        notes.append(
            f"the files hold {of_files.total:,} weights, the config describes {weights.total:,}, which is what counts; "
            "is the download complete, and of this model?"
        )
    return PlannedModel(name, shape, weights, _dtype(fields), stored, tuple(notes))


def _text_of(fields: dict[str, Any]) -> dict[str, Any]:
    text = fields.get("text_config")
    return text if isinstance(text, dict) else {}


def _of_quantised(quantised: Quantisation, weights: Weights, by_files: bool) -> str:
    said = weights.packed.said(weights)
    if not said:
        what = (
            "how many bits its weights have is not known" if quantised.bits is None else "none of its parts is in fewer"
        )
        return f"the checkpoint is quantised ({quantised.method}); {what}, so they count in the dtype named below"
    source = "as its files have it" if by_files else "by its quantization_config"
    return (
        f"the checkpoint is quantised ({quantised.method}): {said}, {source}; the rest and all arithmetic are in the "
        "dtype named below"
    )


def _dtype(fields: dict[str, Any]) -> str | None:
    for place in (fields, _text_of(fields)):
        for key in ("dtype", "torch_dtype"):
            found = canonical(str(place.get(key)))
            if found in WEIGHT_BYTES:
                return found
    return None


def _by_transformers(shape: Architecture, fields: dict[str, Any], name: str) -> Weights:
    """Count on the meta device, where a model takes no memory."""
    what = f"{name}: the weights of model type {shape.model_type!r} cannot be counted"
    advice = "give a directory that holds its safetensors files"
    if shape.note:
        raise UnsupportedModelError(f"{what}: transformers has no class of that name; {advice}")
    try:
        from specdec.models.sizes import named_parameters

        return count_by_name(named_parameters(fields), "transformers' class, built without weights")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}, for which the planner has no formula") from error
    except Exception as error:  # the model's own code
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"{what}: there is no formula for it, and transformers cannot build it ({type(error).__name__}: {reason}); "
            f"{advice}"
        ) from error
