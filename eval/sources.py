"""What the names in a config stand for: files that may change while the config stays as it is."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specdec.api import gguf_path
from specdec.eval.records import ERROR, PROVENANCE, SUMMARY
from specdec.registry import DRAFTERS

_DIGEST = 16  # characters
_PIECE, _PIECES = 1 << 20, 16  # bytes of one, and how many are read of a file: of longer ones they are spread over it
_OF_MODELS = (".safetensors", ".bin", ".pt", ".model", ".json", ".jinja", ".txt", ".xml")  # nothing written for people
_OF_POINTS = (PROVENANCE, SUMMARY, ERROR)  # of one that was measured into the folder of its own head


def digests(config: Any) -> dict[str, str]:
    """Return a digest of every file and folder that the config of a comparison names, by that name.

    Of target, heads and draft models, and of the prompts. Nothing is loaded. Names of other kinds are left out: what
    comes with a package has its version, and of a hub id only who asks the hub knows what it stands for now.

    Args:
        config: with the groups target, drafter, verifier and prompts, and with `beside` and `peer_options`.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    found = {name: digest_of(name) for name in dict.fromkeys(_names(settings))}
    path = settings["prompts"].get("path")
    if path:
        found[path] = _digest(_files_of_rows, path)
    return {name: mark for name, mark in found.items() if mark is not None}


def digest_of(name: str) -> str | None:
    """Return a digest of the model or head that `name` stands for: a file, or a folder with a config.json.

    None of everything else, and of what cannot be read.
    """
    return _digest(_files_of_model, name)


def _names(settings: dict[str, Any]) -> Iterator[str]:
    """Yield what may name a model or a head."""
    beside = {name: own or {} for name, own in (settings.get("beside") or {}).items()}
    yield settings["target"]["name"]
    drafters = [settings["drafter"]["name"], *beside, *(own.get("drafter") for own in beside.values())]
    yield from (str(name) for name in drafters if name is not None and name not in DRAFTERS.table)
    yield from _texts([settings["drafter"]["options"], settings["verifier"]["options"], settings.get("peer_options")])
    yield from _texts([[own.get("drafter_options"), own.get("verifier_options")] for own in beside.values()])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _files_of_model(name: str) -> list[Path]:
    path = gguf_path(name) or Path(name).expanduser()
    if path.is_file():
        return [path]
    if not (path / "config.json").is_file():
        return []
    found = [file for file in path.iterdir() if file.suffix in _OF_MODELS and file.name not in _OF_POINTS]
    return [file for file in found if file.is_file()]


def _files_of_rows(name: str) -> list[Path]:
    """Return the files of a prompt set: one, those that a pattern matches, or all below a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = [file for file in path.rglob("*") if not file.name.startswith(".")]
    else:
        found = [path, *map(Path, glob.glob(str(path), recursive=True))]  # noqa: PTH207 - absolute patterns
    return [file for file in dict.fromkeys(found) if file.is_file()]


def _digest(files_of: Callable[[str], list[Path]], name: str) -> str | None:
    """Return a digest of names and contents of files, of long ones of their length and of pieces."""
    whole = hashlib.sha256()
    try:
        files = sorted(files_of(name))
        for file in files:
            size = file.stat().st_size
            whole.update(f"{file.name}:{size}:".encode())
            count = min(_PIECES, -(-size // _PIECE))
            with file.open("rb") as data:
                for i in range(count):
                    data.seek(i * max(0, size - _PIECE) // max(1, count - 1))
                    whole.update(data.read(_PIECE))
    except (OSError, RuntimeError, ValueError):  # a text that is no path, or a file that is not ours to read
        return None
    return whole.hexdigest()[:_DIGEST] if files else None
