"""What weight files hold, from their headers: no tensor is read."""

from __future__ import annotations

import json
import struct
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
class Stored:
    """Weight files at hand."""

    num_bytes: int
    parameters: tuple[tuple[str, int], ...] = field(default=(), repr=False)  # (name, number of weights)


def read_stored(folder: Path) -> Stored | None:
    """Return what the safetensors files of a directory hold, or None where there are none.

    Raises:
        ModelLoadError: a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        found = [_header(path) for path in files]
        rows = {name: row for header in found for name, row in header.items()}
        return Stored(
            num_bytes=sum(end - start for _, (start, end) in rows.values()),
            parameters=tuple((name, count) for name, (count, _) in rows.items()),
        )
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    try:
        total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
        return Stored(int(total))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{index} has no metadata.total_size: {error}; download it again") from error


def _header(path: Path) -> dict[str, tuple[int, tuple[int, int]]]:
    """Return name -> (number of weights, byte range) of a safetensors file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            rows = json.loads(file.read(length))
        return {
            name: (prod(row["shape"]), (row["data_offsets"][0], row["data_offsets"][1]))
            for name, row in rows.items()
            if name != "__metadata__" and not name.endswith("rotary_emb.inv_freq")  # a table in old files, no weight
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelLoadError(f"{path} is no whole safetensors file: {error}; download it again") from error


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
        parameters=tuple((_hub_name(t.name), prod(t.shape)) for t in header.tensors),
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
    }
    return {name: value for name, value in fields.items() if value is not None}


def _hub_name(name: str) -> str:
    """Return a GGUF tensor's name with the parts that are told apart by name spelled as on the hub."""
    return {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}.get(name, name)
