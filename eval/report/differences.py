"""In what the origins of several points differ, so that their figures are not compared without a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NAMES = {
    "git_sha": "the code (git SHA)",
    "git_dirty": "uncommitted changes (git dirty)",
    "cpu": "the CPU",
    "gpu": "the GPU",
    "num_threads": "the number of threads",
}


def differences(origins: Sequence[dict[str, Any]]) -> list[str]:
    """Return what differs between the sessions that measured, with the values, for example "the CPU: a; b"."""
    sessions = [session for origin in origins for session in (origin, *origin.get("resumed", []))]
    versions = sorted({name for session in sessions for name in session.get("versions") or {}})
    values = [(text, [session.get(name) for session in sessions]) for name, text in _NAMES.items()]
    values += [
        (f"the version of {name}", [(session.get("versions") or {}).get(name) for session in sessions])
        for name in versions
    ]
    return [f"{text}: {'; '.join(_distinct(seen))}" for text, seen in values if len(_distinct(seen)) > 1]


def _distinct(values: Sequence[Any]) -> list[str]:
    """Return the different values as text, in the order met."""
    return list(dict.fromkeys("not known" if value is None else _text(value) for value in values))


def _text(value: Any) -> str:
    text = str(value)
    is_sha = len(text) == 40 and all(letter in "0123456789abcdef" for letter in text)
    return text[:12] if is_sha else text
