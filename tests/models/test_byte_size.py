"""Amounts of memory as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import ConfigError
from specdec.models.byte_size import num_bytes_of


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("512MiB", 2**29),
        ("2 GB", 2 * 10**9),
        ("1.5KiB", 1536),
        ("10k", 10_000),
        ("4Gi", 2**32),
        ("7b", 7),
        (0, 0),
        (None, None),
    ],
)
def test_sizes(value: Any, size: int | None) -> None:
    assert num_bytes_of("kv_memory", value) == size


@pytest.mark.parametrize(
    "value", ["", "-1MiB", "MiB", "1TiBB", "1e9", "nan", "inf", "9" * 400, -1, 1.5, True, float("nan"), b"1"]
)
def test_no_sizes(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_memory=.*allowed: a number of bytes"):
        num_bytes_of("kv_memory", value)
