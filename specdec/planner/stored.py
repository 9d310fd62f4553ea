"""What weight files hold, from their headers: no tensor is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from specdec.errors import ModelLoadError, UnsupportedModelError
from specdec.models.gguf_header import GgufHeader, read_header

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
# GGUF's names of model types whose fields have the meaning they have for Llama.
_GGUF_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    name: str
    count: int  # of numbers in it, packed ones as they are stored
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Weight files at hand."""

    num_bytes: int
    tensors: tuple[Tensor, ...] = field(default=(), repr=False)  # none where files are missing
    note: str = ""


def read_stored(folder: Path) -> Stored | None:
    """Return what the safetensors files of a directory hold, or None where there are none.

    The files are those that transformers would load: model.safetensors, else those that the index names, else what
    is called model*.safetensors. Copies in another layout (consolidated.safetensors) count where nothing else is there.

    Raises:
        ModelLoadError: a file is damaged.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return _of_files([single])
    if index.is_file():
        return _of_index(index)
    for pattern in ("model*.safetensors", "*.safetensors"):
        files = sorted(folder.glob(pattern))
        if files:
            return _of_files(files)
    return None


def _of_files(files: Iterable[Path], names: Container[str] | None = None) -> Stored:
    rows = {row.name: row for path in files for row in _header(path)}
    tensors = tuple(row for row in rows.values() if names is None or row.name in names)
    return Stored(sum(tensor.num_bytes for tensor in tensors), tensors)


def _of_index(index: Path) -> Stored:
    try:
        fields = json.loads(index.read_text(encoding="utf-8"))
        places = fields.get("weight_map") or {}
        names = {str(place) for place in places.values()}
        total = int((fields.get("metadata") or {}).get("total_size") or 0)
        if any(Path(name).name != name for name in names) or total < 0 or not (names or total):
            raise ValueError("neither a weight_map nor a metadata.total_size")
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelLoadError(f"{index} is no index of safetensors files: {error}; download it again") from error
    files = [index.parent / name for name in sorted(names)]
    missing = [path.name for path in files if not path.is_file()]
    if files and not missing:
        return _of_files(files, places)
    note = f"{len(missing)} of the {len(files)} weight files are not there ({missing[0]})" if missing else ""
    return Stored(total, note=note)


def _header(path: Path) -> list[Tensor]:
    """Return the tensors of a safetensors file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            rows = json.loads(file.read(length))
        return [
            _tensor(name, row)
            for name, row in rows.items()
            if name != "__metadata__" and not name.endswith("rotary_emb.inv_freq")  # a table in old files, no weight
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ModelLoadError(f"{path} is no whole safetensors file: {error}; download it again") from error


def _tensor(name: str, row: dict[str, Any]) -> Tensor:
    start, end = row["data_offsets"]
    shape = row["shape"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, end)) or end < start:
        raise ValueError(f"{name} has shape {shape} at bytes {start} to {end}")
    return Tensor(name, prod(shape), end - start)


def gguf_config(path: Path) -> tuple[dict[str, Any], Stored]:
    """Return the fields of a config.json that a GGUF file's header stands for, and what the file holds.

    Raises:
        ModelLoadError: the file cannot be read.
        UnsupportedModelError: its model type has other fields.
    """
    header = read_header(path)
    kind = header.architecture
    if kind not in _GGUF_TYPES:
        raise UnsupportedModelError(
            f"{path.name}: the header of a GGUF file of type {kind!r} is not read by the planner, only of "
            f"{', '.join(_GGUF_TYPES)}; give the config.json of the same model"
        )
    return _fields(header, kind), Stored(
        num_bytes=sum(t.num_bytes for t in header.tensors),
        tensors=tuple(Tensor(_hub_name(t.name), prod(t.shape), t.num_bytes) for t in header.tensors),
    )


def _fields(header: GgufHeader, kind: str) -> dict[str, Any]:
    data = header.metadata
    names = {t.name: t for t in header.tensors}
    fields = {
        "model_type": _GGUF_TYPES[kind],
        "num_hidden_layers": data.get(f"{kind}.block_count"),
        "hidden_size": data.get(f"{kind}.embedding_length"),
        "intermediate_size": data.get(f"{kind}.feed_forward_length"),
        "num_attention_heads": data.get(f"{kind}.attention.head_count"),
        "num_key_value_heads": data.get(f"{kind}.attention.head_count_kv"),
        "head_dim": data.get(f"{kind}.attention.key_length"),
        "max_position_embeddings": data.get(f"{kind}.context_length"),
        "vocab_size": names["token_embd.weight"].shape[-1] if "token_embd.weight" in names else None,
        "tie_word_embeddings": "output.weight" not in names,
        "use_sliding_window": False,  # these model types have no window in a GGUF file
    }
    return {name: value for name, value in fields.items() if value is not None}


def _hub_name(name: str) -> str:
    """Return a GGUF tensor's name with the parts that are told apart by name spelled as on the hub."""
    return {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}.get(name, name)
