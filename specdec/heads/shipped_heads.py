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
    for name in shipped_names():
        config = _config(SHIPPED / name / "config.json")
        trained_for = config["target"]
        sizes = (trained_for["hidden_size"], trained_for["vocab_size"])
        if (
            kind_of_config(config) == kind
            and sizes == (target.hidden_size, target.vocab_size)
            and target.matches(trained_for["probe"])
        ):
            return name
    return None


def no_shipped(kind: str, target: HeadTarget) -> IncompatibleDrafterError:
    """Return the error for a target that no shipped head of this kind is for."""
    of_kind = [n for n in shipped_names() if kind_of_config(_config(SHIPPED / n / "config.json")) == kind]
    trained = "eagle3" if kind == "eagle" else kind  # there is no training of EAGLE-1 heads
    return IncompatibleDrafterError(
        f"no {kind} head ships for {target.name} (hidden size {target.hidden_size}, {target.vocab_size} tokens; of "
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
