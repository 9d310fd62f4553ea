"""Checking the files of a model directory before anything is loaded from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.errors import ModelLoadError

_LENGTH_BYTES = 8  # a safetensors file starts with the length of its header
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        ModelLoadError: the file is missing, unreadable or holds no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is damaged: it holds no valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} is damaged: a JSON object is expected, found {type(data).__name__}")
    return data


def check_safetensors(path: Path) -> None:
    """Check that a safetensors file is as long as its header says. Reads the header only.

    Raises:
        ModelLoadError: the file is damaged or truncated.
    """
    try:
        found = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if found < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{path} is damaged: {found} bytes long, and no safetensors header in front")
            header = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(header) < length:
        raise ModelLoadError(
            f"{path} is truncated: its header alone needs {_LENGTH_BYTES + length} bytes, {found} bytes found"
        )
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        expected = _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelLoadError(f"{path} is damaged: its safetensors header cannot be read ({error})") from error
    if found != expected:
        what = "truncated" if found < expected else "damaged"
        raise ModelLoadError(f"{path} is {what}: {expected} bytes expected, {found} bytes found")


def check_weights(folder: Path) -> None:
    """Check every safetensors file that a model directory loads from. Other weight formats are left alone.

    Raises:
        ModelLoadError: a file is missing, damaged or truncated.
    """
    for path in _weight_files(folder):
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing, but {folder / _INDEX} lists it: download the model again")
        try:
            check_safetensors(path)
        except ModelLoadError as error:
            raise ModelLoadError(f"{error}; download or save the model again") from error


def _weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files in transformers' own order of preference: one file, else the shards of the index."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        yield single
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelLoadError(f"{index} is damaged: no 'weight_map' in it")
        yield from (folder / name for name in sorted({str(name) for name in weight_map.values()}))
