"""From what a user names as a head to its folder, its config and its tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specdec.errors import CheckpointError, ModelLoadError
from specdec.heads.config_fields import ConfigFields
from specdec.heads.shipped_heads import shipped_folder, shipped_names
from specdec.heads.weight_files import WeightFiles
from specdec.models.checkpoint import read_json


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head on disk, in whatever layout."""

    source: str  # as the user wrote it
    folder: Path
    config: ConfigFields
    weights: WeightFiles

    @property
    def names(self) -> list[str]:
        return list(self.weights.shapes)


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Open a head: a folder, a hub id, or the name of a head that ships with specdec.

    Raises:
        CheckpointError: there is no such head, or a file of it is missing or damaged.
    """
    folder = find_folder(source)
    config = folder / "config.json"
    try:
        fields = ConfigFields(read_json(config), str(config))
    except ModelLoadError as error:
        raise CheckpointError(f"{error}; a head is a folder of config.json and weights") from error
    return Checkpoint(os.fspath(source), folder, fields, WeightFiles(folder))


def names_head(name: str) -> bool:
    """Tell whether `name` is written as a head's source: an existing path, a shipped head, or with a slash in it."""
    return Path(name).expanduser().exists() or name in shipped_names() or ("/" in name and ":" not in name)


def find_folder(source: str | os.PathLike[str]) -> Path:
    """Return the local folder of a head; a hub id is downloaded.

    Raises:
        CheckpointError: it names nothing that exists, or cannot be downloaded.
    """
    name = os.fspath(source)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{name} is a file; give the folder that holds it and the head's config.json")
    if name in shipped_names():
        return shipped_folder(name)
    if is_hub_id(source):
        return _downloaded(name)
    shipped = f"; shipped heads: {', '.join(shipped_names())}" if shipped_names() else ""
    raise CheckpointError(f"there is no folder {name}; give a head's folder or hub id (owner/name){shipped}")


def state_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when a file of a checkpoint is written again, so that what was read can be kept till then."""
    files = (path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin", ".pt"))
    stats = ((path.name, path.stat()) for path in files if path.is_file())
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


def is_hub_id(source: object) -> bool:
    """Tell whether a source that is no folder is written as a hub id, owner/name."""
    return isinstance(source, str) and source.count("/") == 1 and not source.startswith((".", "/", "~"))


@cache
def hub_config(hub_id: str) -> Path | None:
    """Return the local copy of a hub repository's config.json; None if there is none or the hub cannot be reached."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(hub_id, "config.json"))
    except Exception:  # whoever then wants the repository says what is wrong with it
        return None


@cache  # a second look would ask the hub again
def _downloaded(hub_id: str) -> Path:
    """Return the local copy of a hub repository's configs and weights; pickles only where there is nothing else."""
    try:
        folder = _snapshot(hub_id, ["*.json", "*.safetensors"])
        if not any(folder.glob("*.safetensors")):
            folder = _snapshot(hub_id, ["*.json", "*.bin", "*.pt"])
    except Exception as error:  # the hub has kinds of its own for missing, private, gated, offline
        raise CheckpointError(
            f"{hub_id!r} is no local folder and cannot be fetched from the Hugging Face Hub ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}); check the name and your access, or, offline (HF_HUB_OFFLINE=1), "
            "download it first"
        ) from error
    return folder


def _snapshot(hub_id: str, patterns: list[str]) -> Path:
    import huggingface_hub

    arguments: dict[str, Any] = {"repo_id": hub_id, "allow_patterns": patterns}
    return Path(huggingface_hub.snapshot_download(**arguments))
