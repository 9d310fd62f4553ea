"""Reading the header of a GGUF file and checking that the file holds everything the header promises.

gguf-py's own reader takes seconds on a real vocabulary and answers a truncated file with a reshape error.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from specdec.errors import ModelLoadError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_FLOAT_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]  # fastest-moving dimension first, as stored
    ggml_type: int
    offset: int  # from `GgufHeader.data_start`
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensor table. Arrays in `metadata` are represented by their length."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    data_start: int
    file_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def expected_bytes(self) -> int:
        return max((self.data_start + t.offset + t.num_bytes for t in self.tensors), default=self.data_start)

    @cached_property
    def num_elements(self) -> int:
        return sum(prod(t.shape) for t in self.tensors)

    @property
    def float_dtype(self) -> str | None:
        """Return the name of the type the weights are stored in, or None if some are quantised."""
        types = {t.ggml_type for t in self.tensors}
        if not types <= _FLOAT_TYPES.keys():
            return None
        # The norms of a half-precision file are float32, so any half type is the model's own.
        return _FLOAT_TYPES[30 if 30 in types else 1 if 1 in types else 0]


class _Truncated(Exception):
    """The header goes on past the end of the file."""


class _Cursor:
    """Reads values in order; never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.end = data, 0, len(data)

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.end - self.at:
            raise _Truncated
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def skip(self, num_bytes: int) -> None:
        if num_bytes > self.end - self.at:
            raise _Truncated
        self.at += num_bytes

    def unpack(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.unpack("<Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} does not exist")
        element, count = self.unpack("<I"), self.unpack("<Q")
        if element in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[element]))
        elif element == _STRING:
            for _ in range(count):
                self.skip(self.unpack("<Q"))
        else:
            for _ in range(count):
                self.value(element)
        return count


def read_header(path: Path, advice: str = "download the file again") -> GgufHeader:
    """Parse a GGUF header and compare what it promises with the size of the file. Reads no tensor data.

    Raises:
        ModelLoadError: the file cannot be read, is no GGUF file, or is damaged or truncated.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise ModelLoadError(
                    f"{path} is not a GGUF file: it is {file_bytes} bytes long and starts with {magic!r} "
                    f"instead of b'GGUF'; {advice}"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _parse(path, _Cursor(data))
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except _Truncated as error:
        raise ModelLoadError(
            f"{path} is damaged: its header goes on past the end of the file ({file_bytes} bytes found); {advice}"
        ) from error
    except (ValueError, OverflowError, MemoryError) as error:
        raise ModelLoadError(f"{path} is damaged: its header cannot be read ({error}); {advice}") from error
    if header.expected_bytes > file_bytes:
        raise ModelLoadError(
            f"{path} is truncated: {header.expected_bytes} bytes expected, {file_bytes} bytes found; {advice}"
        )
    return header


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    cursor.skip(4)
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, versions 2 and 3 are supported")
    num_tensors, num_keys = cursor.unpack("<Q"), cursor.unpack("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("<I"))
    tensors = tuple(_tensor(cursor) for _ in range(num_tensors))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"alignment {alignment!r}")
    return GgufHeader(path, metadata, tensors, -(-cursor.at // alignment) * alignment, cursor.end)


def _tensor(cursor: _Cursor) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, num_dims = cursor.string(), cursor.unpack("<I")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.unpack("<Q") for _ in range(num_dims))
    ggml_type, offset = cursor.unpack("<I"), cursor.unpack("<Q")
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    return GgufTensor(name, shape, ggml_type, offset, prod(shape) // block_elements * block_bytes)
