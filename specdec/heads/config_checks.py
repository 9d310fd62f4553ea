"""Checks of a head's shape that every file layout goes through: a damaged config is named, not built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specdec.errors import CheckpointError

LARGEST = 2**20  # of widths and counts of tokens in one head
MOST_MODULES = 256  # of layers, and of Medusa heads: each is a module that is built before its weights are read
_LARGEST_FLOAT = 1e300


def check_integers(config: Any, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raise CheckpointError unless the fields of `config` are integers within their ranges, ends included."""
    for name, (least, most) in ranges.items():
        value = getattr(config, name)
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(f"{name}={value!r}; allowed: an integer from {least} to {most}")


def check_flags(config: Any, names: Iterable[str]) -> None:
    """Raise CheckpointError unless the fields of `config` are true or false."""
    for name in names:
        if type(getattr(config, name)) is not bool:
            raise CheckpointError(f"{name}={getattr(config, name)!r}; allowed: true or false")


def check_positive(name: str, value: Any) -> None:
    """Raise CheckpointError unless a value is a finite number > 0."""
    if not is_number(value) or not value > 0:
        raise CheckpointError(f"{name}={value!r}; allowed: a finite number > 0")


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < _LARGEST_FLOAT
