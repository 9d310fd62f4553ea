"""The page of a trace, whole in one file: template, style, scripts and data."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment

from specdec.errors import InputError
from specdec.eval.trace_page.page_data import page_data
from specdec.eval.trace_page.visible import readable, script_json, visible

MOST_BYTES = 20_000_000  # of data that a page of several requests may hold; more opens slowly
_MOST_PLAIN_STEPS = 200  # that are also listed for readers without scripts
_SCRIPTS = ("dom.js", "token.js", "tree.js", "times.js", "step.js", "page.js")
_STATES = {"a": "accepted", "r": "rejected", "n": "not judged", "t": "not taken"}


def trace_page(path: str | Path, run: str | None = None, request_id: int | None = None) -> str:
    """Return the page of a trace file as HTML.

    Args:
        path: of the trace.
        run: only this one: its number in the file, from 1, or its id.
        request_id: only this request of each run that has it.

    Raises:
        InputError: the file cannot be read, holds no step or not what was asked for, or is too large for one page.
    """
    data = page_data(path, run, request_id)
    text = script_json(data)
    if len(text) > MOST_BYTES and sum(len(part["requests"]) for part in data["runs"]) > 1:
        raise InputError(_too_large(len(text), data))
    style, script = _text("page.css"), "\n".join(map(_text, _SCRIPTS))
    num_steps = sum(len(request["steps"]) for part in data["runs"] for request in part["requests"])
    return _template().render(
        data=data,
        json=text,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        plain=num_steps <= _MOST_PLAIN_STEPS,
        states=_STATES,
    )


def _template() -> Any:
    environment = Environment(autoescape=True)
    environment.filters |= {"readable": readable, "token": _token, "outline": outline}
    return environment.from_string(_text("page.html"))


def outline(parents: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (node, parent, depth) of a draft's nodes, each before those that continue it, whatever its depth.

    A list of lists would nest as deep as the draft, which neither templates nor browsers bear.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, 1):
        children.setdefault(parent, []).append(node)
    found, left = [], [(node, 0, 1) for node in reversed(children.get(0, []))]
    while left:
        node, parent, depth = left.pop()
        found.append((node, parent, depth))
        left += [(child, node, depth + 1) for child in reversed(children.get(node, []))]
    return found


def _token(run: dict[str, Any], token: int) -> str:
    text = run["texts"].get(str(token))
    return f"#{token}" if text is None else f"“{visible(text)}”"


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows an inline style or script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _too_large(num_bytes: int, data: dict[str, Any]) -> str:
    ids = [request["id"] for part in data["runs"] for request in part["requests"]]
    runs = f" and --run (1 to {data['runs'][-1]['number']})" if len(data["runs"]) > 1 else ""
    return (
        f"the page would hold {num_bytes / 1e6:.0f} MB, and at most {MOST_BYTES / 1e6:.0f} MB open quickly; choose one "
        f"of its {len(ids)} requests with --request ({min(ids)} to {max(ids)}){runs}"
    )
