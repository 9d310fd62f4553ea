"""A distilled draft model that borrows its target's embedding and output rows: what is stored is its blocks alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from specdec.errors import CheckpointError, IncompatibleDrafterError, ModelLoadError
from specdec.heads.config_fields import ConfigFields
from specdec.heads.draft_vocabulary import DraftVocabulary, whole_vocabulary
from specdec.heads.saving import DRAFT_IDS, FORMAT, FORMAT_VERSION, described
from specdec.heads.target import HeadTarget
from specdec.heads.writing import CONFIG, WEIGHTS, cast, write_checkpoint
from specdec.models.checkpoint import read_json
from specdec.models.small_copy import build_small, own_tensors, small_config

KIND = "draft_model"
_SCALE, _LARGEST = "_scale", 127.0


def save_small_model(
    folder: Path | str,
    model: Any,
    layers: tuple[int, ...],
    vocabulary: DraftVocabulary,
    target: HeadTarget,
    *,
    settings: Mapping[str, Any] | None = None,
    card: str | None = None,
    dtype: torch.dtype = torch.int8,
) -> Path:
    """Write a model from `small_copy` without what is its target's, and return its folder.

    Args:
        folder: made if missing.
        model: the model.
        layers: the target's blocks that it began as.
        vocabulary: which of the target's tokens it drafts.
        target: whose draft model it is.
        settings: advised options of the drafter.
        card: the text of README.md.
        dtype: of the stored weights. int8: matrices as int8 with a scale per row, the rest as float16.

    Raises:
        CheckpointError: see `save_head`.
    """
    config = described(KIND, {"layers": list(layers)}, target, settings)
    own = own_tensors(model)
    tensors = rounded_rows(own) if dtype == torch.int8 else cast(own, dtype)
    if not vocabulary.is_whole:
        tensors[DRAFT_IDS] = vocabulary.target_ids.to(torch.int32)
    return write_checkpoint(folder, tensors, config, card)


def load_small_model(folder: Path | str, model: Any, target: HeadTarget) -> tuple[Any, DraftVocabulary]:
    """Return the draft model in a folder, around the target's own embedding and output rows, and what it drafts.

    Args:
        folder: written by `save_small_model`.
        model: the target's transformers model.
        target: the same as a head sees it.

    Raises:
        CheckpointError: a file is damaged, or tensors are missing, unexpected or of the wrong shape.
        IncompatibleDrafterError: it was distilled for another target.
    """
    folder = Path(folder)
    about = _about(folder)
    layers = _layers_for(about, target, folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {error}; it is missing or cut off") from error
    vocabulary = _vocabulary(tensors.pop(DRAFT_IDS, None), target, folder)
    small = build_small(small_config(model.config, layers), model)
    _fill(small, whole_rows(tensors, folder), folder)
    own = [p for p in small.parameters() if p.requires_grad]
    if not vocabulary.is_whole:
        small.set_output_embeddings(_rows(target.output_rows(vocabulary.target_ids)))
    _place(small, own, target)
    return small.eval().requires_grad_(False), vocabulary


def rounded_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as int8 with a float32 scale per row under `<name>_scale`, and everything else as float16."""
    small = cast({name: t for name, t in tensors.items() if t.dim() != 2}, torch.float16)
    for name, matrix in tensors.items():
        if matrix.dim() == 2:
            values = cast({name: matrix}, torch.float32)[name]
            scale = (values.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp_min(1e-12)
            small[name] = (values / scale).round().to(torch.int8)
            small[name + _SCALE] = scale[:, 0]
    return small


def whole_rows(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return what `rounded_rows` was made of, as far as int8 holds it; other tensors as they are.

    Raises:
        CheckpointError: a matrix has no scale, or one for other rows; a weight is no finite number.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors:
            continue
        if tensor.dtype == torch.int8:
            scale = tensors.get(name + _SCALE)
            fits = scale is not None and tensor.dim() == 2 and scale.shape == tensor.shape[:1]
            if scale is None or not fits or not scale.dtype.is_floating_point:
                raise CheckpointError(f"{folder / WEIGHTS}: {name} is int8 and {name + _SCALE} is missing or misshapen")
            tensor = tensor.to(torch.float32) * scale[:, None]
        if not tensor.dtype.is_floating_point or not bool(torch.isfinite(tensor).all()):
            what = f"is stored as {str(tensor.dtype).removeprefix('torch.')}"
            if tensor.dtype.is_floating_point:
                what = "has NaN or infinite values"
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name} {what}; finite int8 or floating-point weights are expected"
            )
        whole[name] = tensor
    return whole


def is_small_model(folder: Path) -> bool:
    """Tell whether a folder holds a model from `save_small_model`."""
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return bool(about.get("format") == FORMAT and about.get("kind") == KIND)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def advised_settings(folder: Path) -> dict[str, Any]:
    """Return the options of the drafter that the model in a folder advises."""
    return _about(folder).inner("settings").advice()


def _about(folder: Path) -> ConfigFields:
    try:
        about = ConfigFields(read_json(folder / CONFIG), str(folder / CONFIG))
        kind, version = (about.text("format"), about.text("kind")), about.integer("format_version")
        if kind != (FORMAT, KIND) or version != FORMAT_VERSION:
            raise CheckpointError(f"format {kind[0]!r}, kind {kind[1]!r}, format_version {version}")
    except (ModelLoadError, CheckpointError) as error:
        raise CheckpointError(f"{folder / CONFIG} does not describe a distilled draft model: {error}") from error
    return about


def _layers_for(about: ConfigFields, target: HeadTarget, folder: Path) -> list[int]:
    """Return the target's blocks that a draft model began as.

    Raises:
        CheckpointError: a field is missing or of the wrong type.
        IncompatibleDrafterError: it is another target's.
    """
    trained_for = about.inner("target")
    sizes = trained_for.integer("hidden_size"), trained_for.integer("vocab_size")
    probe, name = trained_for.numbers("probe"), trained_for.text("name")
    layers = about.inner("head").integers("layers")
    if layers is None:
        raise CheckpointError(f"{about.where} does not describe a distilled draft model: it names no layers")
    if sizes != (target.hidden_size, target.vocab_size) or not target.matches(probe):
        raise IncompatibleDrafterError(
            f"the draft model in {folder} was distilled for {name} and borrows that model's embedding; "
            f"{target.name} is another one"
        )
    if not 0 < len(layers) <= target.num_layers or not all(0 <= layer < target.num_layers for layer in layers):
        raise CheckpointError(f"{about.where}: layers={layers}; allowed: at least one of 0 to {target.num_layers - 1}")
    return layers


def _vocabulary(ids: Tensor | None, target: HeadTarget, folder: Path) -> DraftVocabulary:
    if ids is None:
        return whole_vocabulary(target.vocab_size)
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.numel():
        raise CheckpointError(
            f"{folder / WEIGHTS}: {DRAFT_IDS} is {str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}; "
            "a list of token ids, int32, is expected"
        )
    return DraftVocabulary(ids.to(torch.int64), target.vocab_size)


def _fill(small: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    own = own_tensors(small)
    faults = [f"missing {name}" for name in sorted(own.keys() - tensors.keys())]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - own.keys())]
    faults += [
        f"{name} has the shape {tuple(tensors[name].shape)} and needs {tuple(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if tensors[name].shape != own[name].shape
    ]
    if faults:
        raise CheckpointError(f"the draft model in {folder} does not fit its config: {'; '.join(faults)}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _place(small: Any, own: list[nn.Parameter], target: HeadTarget) -> None:
    """Put what is not borrowed where the target is. Buffers keep their dtype: rotary tables are never rounded."""
    borrowed = {id(b) for m in (small.get_input_embeddings(), small.get_output_embeddings()) for b in m.buffers()}
    for tensor in [*own, *(b for b in small.buffers() if id(b) not in borrowed)]:
        is_own = isinstance(tensor, nn.Parameter)
        tensor.data = tensor.data.to(device=target.device, dtype=target.dtype if is_own else tensor.dtype)


def _rows(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
