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


def origin_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a provenance.json that are what they should be: figures do not need it, people write it."""
    kept: dict[str, Any] = {
        name: found[name] for name in (*_NAMES, "time") if isinstance(found.get(name), str | int | float)
    }
    argv, versions, resumed = (found.get(name) for name in ("argv", "versions", "resumed"))
    kept["argv"] = [str(word) for word in argv] if isinstance(argv, list) else []
    kept["versions"] = {name: str(own) for name, own in versions.items()} if isinstance(versions, dict) else {}
    others = resumed if isinstance(resumed, list) else []
    kept["resumed"] = [origin_of(other | {"resumed": []}) for other in others if isinstance(other, dict)]
    return kept


def differences(origins: Sequence[dict[str, Any]]) -> list[str]:
    """Return what differs between the sessions of `origin_of`, with the values, for example "the CPU: a; b"."""
    sessions = [session for origin in origins for session in (origin, *origin["resumed"])]
    versions = sorted({name for session in sessions for name in session["versions"]})
    values = [(text, [session.get(name) for session in sessions]) for name, text in _NAMES.items()]
    for name in versions:  # of those that name it: a library that one machine lacks has measured nothing there
        values.append((f"the version of {name}", [s["versions"][name] for s in sessions if name in s["versions"]]))
    return [f"{text}: {'; '.join(_distinct(seen))}" for text, seen in values if len(_distinct(seen)) > 1]


def _distinct(values: Sequence[Any]) -> list[str]:
    """Return the different values as text, in the order met."""
    return list(dict.fromkeys("not known" if value is None else _text(value) for value in values))


def _text(value: Any) -> str:
    text = str(value)
    is_sha = len(text) == 40 and all(letter in "0123456789abcdef" for letter in text)
    return text[:12] if is_sha else text
