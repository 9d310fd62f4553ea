"""Names of number formats, and how a wrong name is answered."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from specdec.errors import ConfigError

# What stores weights and computes.
WEIGHT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
# What stores keys and values: bytes per number, and bytes of one scale per token, head and side.
KV_BYTES: dict[str, tuple[float, int]] = {
    "fp32": (4, 0),
    "bf16": (2, 0),
    "fp16": (2, 0),
    "int8": (1, 2),  # a scale is a bfloat16: see specdec/kv/codecs.py, a test compares
    "int4": (0.5, 2),
}
_SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def canonical(name: str) -> str:
    """Return the short spelling of a number format's name; others come back as they are."""
    plain = str(name).strip().lower().removeprefix("torch.")
    return _SPELLINGS.get(plain, plain)


def choose(what: str, name: str, allowed: Iterable[str], hints: Mapping[str, str] | None = None) -> str:
    """Return `name` in its canonical spelling if it is allowed.

    Args:
        what: is named, for the message.
        name: as the user wrote it.
        allowed: the names there are.
        hints: what to say about certain names that are not allowed.

    Raises:
        ConfigError: it is not; the message has the nearest that is.
    """
    names, found = list(allowed), canonical(name)
    if found in names:
        return found
    close = difflib.get_close_matches(found, names, n=1)
    hint = (hints or {}).get(found) or (f"did you mean {close[0]!r}?" if close else "")
    raise ConfigError(f"unknown {what} {name!r};{' ' * bool(hint)}{hint} available: {', '.join(names)}")
