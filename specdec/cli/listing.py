"""`specdec list`: what can be chosen."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from specdec.cli.console import ending_with_a_status, output, plain, write_json
from specdec.models.builtin import BUILTIN_MODELS
from specdec.registry import DRAFTERS, VERIFIERS, Registry

_TESTING = "specdec.drafters.testing:"
_AUTO = {
    "name": "auto",
    "summary": "The default: match when greedy, with a seed or without draft probabilities, else rejection.",
    "options": {},
    "lossless": True,
}


def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List drafters, the trained ones that ship, verifiers and built-in models."""
    with ending_with_a_status():
        drafters = _entries(DRAFTERS)
        tests = [entry for entry in drafters if DRAFTERS.table.get(entry["name"], "").startswith(_TESTING)]
        found = {
            "drafters": [entry for entry in drafters if entry not in tests],
            "test_drafters": tests,
            "verifiers": [_AUTO, *_entries(VERIFIERS)],
            "trained_drafters": _trained(),
            "models": [
                {
                    "name": model.name,
                    "title": model.title,
                    "installed": find_spec(model.package) is not None,
                    "install": model.install,
                }
                for model in BUILTIN_MODELS.values()
            ],
        }
        if as_json:
            write_json(found)
        else:
            _print(found)


def _entries(registry: Registry) -> list[dict[str, Any]]:
    return [_entry(registry, name) for name in registry.names()]


def _entry(registry: Registry, name: str) -> dict[str, Any]:
    try:
        kind = registry.load(name)
        build = getattr(kind, "build", None)
        parameters = list(inspect.signature(build).parameters.values())[1:] if build else []
        summary = (inspect.getdoc(kind) or "").split("\n")[0]
    except Exception as error:  # somebody else's entry point must not hide the rest
        return {"name": name, "error": str(error)}
    options = {p.name: None if p.default is p.empty else _plain_value(p.default) for p in parameters}
    entry = {"name": name, "summary": summary, "options": options}
    return entry if registry is DRAFTERS else {**entry, "lossless": bool(getattr(kind, "lossless", True))}


def _trained() -> list[dict[str, Any]]:
    from specdec.heads.shipped_heads import kind_of_config, shipped_config, shipped_names

    configs = {name: shipped_config(name) for name in shipped_names()}
    return [
        {"name": name, "drafter": kind_of_config(config), "target": config["target"]["name"]}
        for name, config in configs.items()
    ]


def _plain_value(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple | dict) else str(value)


def _print(found: dict[str, list[dict[str, Any]]]) -> None:
    out = output()
    for title, kind, key in (
        ("Drafters", "drafter", "drafters"),
        ("Trained drafters that ship", "trained drafter", "trained_drafters"),
        ("Verifiers", "verifier", "verifiers"),
        ("Built-in models", "model", "models"),
        ("Drafters for tests and measurements", "drafter", "test_drafters"),
    ):
        third = "from" if key == "models" else "options" if kind == "drafter" else ""
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
        )
        table.add_column(kind, no_wrap=True)
        table.add_column()
        table.add_column(third, max_width=out.width * 3 // 10 if third == "options" else None)
        for entry in found[key]:
            table.add_row(entry["name"], *_row(entry))
        out.print(table)
        out.print()
    out.print("Your own drafter or verifier: package.module:Class, or an entry point.")
    out.print("Other models: a hub id, a local directory or a .gguf file.")


def _row(entry: dict[str, Any]) -> tuple[Text, Text]:
    if "error" in entry:
        return Text(plain(f"cannot be loaded: {entry['error']}"), style="red"), Text("")
    if "target" in entry:
        return Text(f"{entry['drafter']} for {entry['target']}"), Text("")
    if "title" in entry:
        return Text(entry["title"]), Text("installed" if entry["installed"] else f"`{entry['install']}`")
    summary = plain(entry["summary"])
    if not entry.get("lossless", True):
        summary = f"NOT LOSSLESS. {summary}"
    options = [name if value is None else f"{name}={value}" for name, value in entry["options"].items()]
    return Text(summary), Text(", ".join(options))
