"""Amounts of memory as users write them."""

from __future__ import annotations

import re
from typing import Any

from specdec.errors import ConfigError

_PREFIXES = {f"{p}{b}": u**i for b, u in (("", 1000), ("i", 1024)) for i, p in enumerate("KMGT", 1)}
_UNITS = {"": 1, "B": 1} | {prefix + b: size for prefix, size in _PREFIXES.items() for b in ("B", "")}
_MOST_DIGITS = 24
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def num_bytes_of(name: str, value: Any) -> int | None:
    """Return a number of bytes from an integer or a text such as "2GiB"; None stays None.

    Raises:
        ConfigError: it is neither; `name` is the option that is named.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    found = _FORM.fullmatch(value) if isinstance(value, str) else None
    unit = None if found is None else next((u for u in _UNITS if u.lower() == found[2].lower()), None)
    # More digits than any memory has bytes would be no number of bytes either.
    if found is None or unit is None or len(found[1]) > _MOST_DIGITS:
        raise ConfigError(
            f"{name}={value!r}; allowed: a number of bytes, an integer >= 0, a text such as '2GiB' or '500MB', or None"
        )
    return int(float(found[1]) * _UNITS[unit])
