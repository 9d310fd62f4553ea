"""The option `model=` of `draft_model`, where it names a model that was distilled for its target. Drafts nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specdec.errors import CheckpointError
from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.shipped_heads import SHIPPED, no_shipped, shipped_for, shipped_names
from specdec.heads.small_model import KIND, is_small_model, load_small_model
from specdec.heads.target import head_target
from specdec.interfaces import DrafterContext


def given_small_model(context: DrafterContext, model: Any) -> tuple[Any, DraftVocabulary] | None:
    """Return the distilled draft model that `model` names, or None if it names an ordinary one.

    Args:
        context: of the target.
        model: None = the one that ships for this target; a directory or the name of a shipped one; anything else is an
            ordinary model.

    Raises:
        CheckpointError: it is damaged.
        IncompatibleDrafterError: none ships for this target, or it was distilled for another one.
    """
    target = head_target(context.runner)
    if model is None:
        name = shipped_for(KIND, target)
        if name is None:
            raise no_shipped(KIND, target)
        folder = SHIPPED / name
    elif isinstance(model, str | os.PathLike):
        folder = SHIPPED / model if model in shipped_names() else Path(model).expanduser()
        if not is_small_model(folder):
            return None
    else:
        return None
    key = (KIND, str(folder))
    if key not in context.runner.loaded:
        if context.runner.model is None:
            raise CheckpointError(f"the draft model in {folder} is built around its target's modules, which are absent")
        context.runner.loaded[key] = load_small_model(folder, context.runner.model, target)
    found: tuple[Any, DraftVocabulary] = context.runner.loaded[key]
    return found
