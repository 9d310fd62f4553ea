"""The trained heads that come with specdec, and which of them is a target's."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from specdec.errors import IncompatibleDrafterError
from specdec.heads.target import HeadTarget

SHIPPED = Path(__file__).parent / "shipped"


def shipped_names() -> list[str]:
    """Return the names of the shipped heads, which are accepted wherever a head's folder is."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))


def shipped_folder(name: str) -> Path:
    """Return the folder of a shipped head."""
    return SHIPPED / name


def shipped_for(kind: str, target: HeadTarget) -> str | None:
    """Return the name of the shipped head of this kind ("eagle3", "eagle", "medusa") that is the target's, or None."""
    fitting = shipped_of_sizes(kind, target.hidden_size, target.vocab_size)
    return next((name for name, trained_for in fitting.items() if target.matches(trained_for["probe"])), None)


def shipped_of_sizes(kind: str, hidden_size: int, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return what the shipped heads of this kind for targets of these sizes were trained for, by name."""
    configs = {name: shipped_config(name) for name in shipped_names()}
    return {
        name: config["target"]
        for name, config in configs.items()
        if kind_of_config(config) == kind
        and (config["target"]["hidden_size"], config["target"]["vocab_size"]) == (hidden_size, vocab_size)
    }


def shipped_config(name: str) -> dict[str, Any]:
    """Return the config.json of a shipped head."""
    return _config(SHIPPED / name / "config.json")


def no_shipped(kind: str, target: HeadTarget) -> IncompatibleDrafterError:
    """Return the error for a target that no shipped head of this kind is for."""
    return IncompatibleDrafterError(why_none_ships(kind, target.name, target.hidden_size, target.vocab_size))


def why_none_ships(kind: str, target: str, hidden_size: int | None, vocab_size: int | None) -> str:
    """Return what there is instead, for a target that no shipped head of this kind is for."""
    of_kind = [n for n in shipped_names() if kind_of_config(shipped_config(n)) == kind]
    trained = "eagle3" if kind == "eagle" else kind  # there is no training of EAGLE-1 heads
    return (
        f"no {kind} head ships for {target} (hidden size {hidden_size}, {vocab_size} tokens; of "
        f"this kind ship: {', '.join(of_kind) or 'none'}). Give one, drafter_options={{'model': a folder or hub id}}, "
        f"or train one for your model, specdec train {trained} --target ..., or use the drafter 'self_int8', 'suffix' "
        "or 'ngram', which need no training"
    )


def kind_of_config(config: dict[str, Any]) -> str:
    """Return the registered name of the drafter that a head in specdec's own layout is for."""
    if config.get("kind") != "eagle":
        return str(config.get("kind"))
    return "eagle3" if config["head"].get("generation") == 3 else "eagle"


@cache  # a drafter is built with every call of generate()
def _config(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
