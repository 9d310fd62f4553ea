"""The weight files of a head's checkpoint: names and shapes at once, tensors one at a time.

A head may sit in the files of a whole model, of which only its own few tensors are to be read.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import CheckpointError, ModelLoadError
from specdec.models.checkpoint import check_safetensors, read_json

# In order of preference. Medusa's own name comes first: its folder may hold the target too.
_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "*.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "*.bin",
    "*.pt",
)
_NO_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt"}
_CONVERT = (
    "to convert it, load it where you trust it and write its tensors with safetensors.torch.save_file(tensors, "
    "'model.safetensors')"
)


class WeightFiles:
    """All tensors of a checkpoint folder, whatever files they are in.

    Raises:
        CheckpointError: there is no file to be read, one is missing, damaged or truncated, or is a pickle of more than
            tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[str, _Safetensors | _Pickle] = {}
        for path in _weight_files(folder):
            reader = _Safetensors(path) if path.suffix == ".safetensors" else _Pickle(path)
            for name in reader.shapes:
                if name in self._readers:
                    raise CheckpointError(f"{name} is in {path} and in {self._readers[name].path}; remove one of them")
                self._readers[name] = reader

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: reader.shapes[name] for name, reader in self._readers.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        return self._readers[name].read(name)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Return the rows `ids` of a matrix without reading the others."""
        return self._readers[name].rows(name, ids.tolist())


def _mapped(path: Path) -> Any:
    return safe_open(path, framework="pt")  # untyped


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_safetensors(path)
            self._file = _mapped(path)
            self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        except (ModelLoadError, SafetensorError, OSError) as error:
            raise CheckpointError(f"{error}; download or save the head again") from error

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def rows(self, name: str, ids: list[int]) -> Tensor:
        matrix = self._file.get_slice(name)
        return torch.cat([matrix[i : i + 1] for i in ids])


class _Pickle:
    """A file of torch.save. Only tensors are unpickled: nothing in it can run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        held = _unpickled(path)
        if isinstance(held, dict) and set(held) == {"state_dict"}:
            held = held["state_dict"]
        others = [str(k) for k, v in held.items() if not isinstance(v, Tensor)] if isinstance(held, dict) else None
        if others is None or others:
            what = f"values that are no tensors: {', '.join(others)}" if others else f"a {type(held).__name__}"
            raise CheckpointError(f"{path} holds {what}; a dict of tensors is expected, and {_CONVERT}")
        self._tensors: dict[str, Tensor] = {str(name): tensor for name, tensor in held.items()}
        odd = [name for name, t in self._tensors.items() if t.layout != torch.strided or t.is_meta or t.is_quantized]
        if odd:
            raise CheckpointError(
                f"{path} holds tensors that are sparse, quantised or without values (meta): {', '.join(odd[:3])}; "
                f"dense ones are expected, and {_CONVERT}"
            )
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def rows(self, name: str, ids: list[int]) -> Tensor:
        return self._tensors[name][ids]


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"  # files of old versions of torch cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if "truncated" in str(error):
            raise _damaged(path, error) from error
        raise CheckpointError(
            f"{path} is a pickle that holds more than tensors, and unpickling it could run any code: it is not read "
            f"({_first_line(error)}); {_CONVERT}"
        ) from error
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError, ... for damaged files
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated or damaged, {path.stat().st_size if path.exists() else 0} bytes found "
        f"({type(error).__name__}: {_first_line(error)}); download or save the head again"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


def _weight_files(folder: Path) -> Iterator[Path]:
    for pattern in _FILES:
        found = sorted(path for path in folder.glob(pattern) if path.name not in _NO_WEIGHTS)
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds {len(found)} weight files and no index that says what is in which: "
                f"{', '.join(path.name for path in found)}; leave the head's own one there"
            )
        if found:
            yield from _shards(found[0]) if found[0].suffix == ".json" else found
            return
    others = sorted(path.name for path in folder.iterdir() if path.is_file())
    raise CheckpointError(
        f"{folder} holds no weights of a head: .safetensors, or .bin and .pt files of tensors, are read; "
        f"found: {', '.join(others) or 'nothing'}"
    )


def _shards(index: Path) -> Iterator[Path]:
    try:
        weight_map = read_json(index).get("weight_map")
    except ModelLoadError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is damaged: no 'weight_map' in it")
    for name in sorted({str(name) for name in weight_map.values()}):
        path = index.parent / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, but {index.name} lists it; download the head again")
        yield path
