"""Token texts as text that can be seen, and data as JSON that cannot leave its script element."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

# Escaped, they can neither end the script element nor begin a comment in it.
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}
_MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "·"}
LARGEST_INT = 2**53 - 1  # that a browser can count to
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})  # control, format, surrogate, ..., other spaces


def visible(text: str) -> str:
    """Return a token's text with a mark for each character that cannot be seen."""
    return "".join(_MARKS.get(c) or (f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c) in _UNSEEN else c) for c in text)


def readable(text: str) -> str:
    """Return a longer text with its lines and spaces, and marks only for what a page cannot hold."""
    return "".join(c if c in "\n\t " else visible(c) for c in text)


def script_json(value: Any) -> str:
    """Return `value` as ASCII JSON for a script element.

    NaN and infinities become null, integers that a browser would round become texts, lone surrogates stay.
    """
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return str(value)  # a seed, say: a browser would round it
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
