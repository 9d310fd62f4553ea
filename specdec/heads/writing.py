"""Writing a checkpoint folder so that it appears whole or not at all."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specdec.errors import CheckpointError

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_OLD = f"{CONFIG}.old"


def write_checkpoint(
    folder: Path | str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], card: str | None = None
) -> Path:
    """Write weights, config.json and, if given, README.md; return the folder.

    All files are written beside their place and moved there when they are whole. A folder that exists has no
    config.json while that goes on: a process that is killed leaves the old state, the new one, or one that is refused.
    Files of other names are left alone.

    Args:
        folder: made if missing, parents too.
        tensors: name -> tensor on any device.
        config: what JSON can hold.
        card: Markdown.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; what stood there before still stands, unless
            it says otherwise.
    """
    folder = Path(folder)
    staged: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder.name} is a file")
        room = folder if folder.is_dir() else folder.parent
        staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.part-", dir=room))
        save_file(_storable(tensors), staged / WEIGHTS, {"format": "pt"})
        if card is not None:
            (staged / CARD).write_text(card.rstrip() + "\n", encoding="utf-8")
        (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _allow_what_is_usual(staged)
        _move(staged, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error}; nothing was changed there. Free some space or give another folder"
        ) from error
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
    return folder


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors with the floating-point ones in `dtype`.

    Raises:
        CheckpointError: a weight is not finite, or too large for `dtype`.
    """
    found = {name: t.detach().to(dtype) if t.is_floating_point() else t.detach() for name, t in tensors.items()}
    for name, tensor in found.items():
        if not bool(torch.isfinite(tensor).all()):
            worst = float(tensors[name].detach().abs().max())
            reason = f"its largest weight is {worst:g}" if worst == worst else "it has NaN"
            raise CheckpointError(
                f"{name} cannot be stored in {str(dtype).removeprefix('torch.')}: {reason}; "
                "store in float32, or look for what went wrong in training"
            )
    return found


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, each with memory of its own."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def _allow_what_is_usual(staged: Path) -> None:
    """Give the folder and its weights the rights that new files have here: theirs are for the owner only."""
    usual = stat.S_IMODE((staged / CONFIG).stat().st_mode)
    (staged / WEIGHTS).chmod(usual)
    staged.chmod(usual | (usual & 0o444) >> 2 | 0o700)  # who may read files may enter the folder


def _move(staged: Path, folder: Path) -> None:
    if not folder.is_dir():
        staged.rename(folder)
        return
    # New weights never stand under an old config.
    kept = folder / CONFIG
    if kept.exists():
        kept.rename(staged / _OLD)
    moved = 0
    try:
        for name in (CARD, WEIGHTS, CONFIG):
            if (staged / name).exists():
                (staged / name).replace(folder / name)
                moved += name == WEIGHTS
    except OSError as error:
        if moved:
            raise CheckpointError(
                f"{folder} was written in part: {error}; it has no {CONFIG}, so it is refused. Write it again"
            ) from error
        if (staged / _OLD).exists():
            (staged / _OLD).rename(kept)
        raise
