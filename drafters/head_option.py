"""The option `model=` of drafters that run a trained head. Drafts nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.errors import ConfigError
from specdec.heads.loaded import LoadedHead
from specdec.heads.loading import load_head
from specdec.heads.shipped_heads import no_shipped, shipped_for
from specdec.heads.target import head_target
from specdec.interfaces import DrafterContext


def head_option(name: str, context: DrafterContext, model: Any) -> LoadedHead:
    """Return the head that the option names, read from its files once per target.

    Args:
        name: of the drafter, under which heads ship.
        context: of the target.
        model: a folder, a hub id, the name of a shipped head, or a LoadedHead; None = the one that ships for this
            target.

    Raises:
        CheckpointError: the head cannot be read.
        ConfigError: `model` is something else.
        IncompatibleDrafterError: the head is another target's, or none ships for this one.
    """
    if isinstance(model, LoadedHead):
        return model
    if model is not None and not isinstance(model, str | Path):
        raise ConfigError(
            f"drafter {name!r}: model is a {type(model).__name__}; allowed: a folder, a hub id, the name of a shipped "
            "head, or a LoadedHead"
        )
    loaded, key = context.runner.loaded, ("head", name, str(model))
    if key not in loaded:
        target = head_target(context.runner)
        source = shipped_for(name, target) if model is None else model
        if source is None:
            raise no_shipped(name, target)
        loaded[key] = load_head(source, target)
    found: LoadedHead = loaded[key]
    return found
