"""Settings as a reader takes them in at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_LETTERS = 40  # of a value


def in_short(settings: Mapping[str, Any], before: str = "") -> list[str]:
    """Return settings as "name=value", those of a group by dotted names; long values are cut, unset ones left out.

    Args:
        settings: by name; values as YAML or JSON hold them.
        before: comes before each name.
    """
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += in_short(value, f"{before}{name}.")
        elif value is not None:
            text = str(value)
            found.append(f"{before}{name}={text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + '…'}")
    return found
