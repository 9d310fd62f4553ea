"""The option `model=` of `draft_model`, where it names a model that was distilled for its target. Drafts nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from specdec.heads.checkpoint import find_folder, hub_config, is_hub_id, state_of
from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.shipped_heads import SHIPPED, no_shipped, shipped_for, shipped_names
from specdec.heads.small_model import KIND, advised_settings, is_small_model, load_small_model
from specdec.heads.target import head_target
from specdec.interfaces import DrafterContext


class SmallModel(NamedTuple):
    """A distilled draft model around its target's modules."""

    model: Any
    vocabulary: DraftVocabulary
    settings: dict[str, Any]  # what it advises: tree, max_draft_tokens


def given_small_model(context: DrafterContext, model: Any) -> SmallModel | None:
    """Return the distilled draft model that `model` names, or None if it names an ordinary one.

    Args:
        context: of the target.
        model: None = the one that ships for this target; a directory, a hub id or the name of a shipped one; anything
            else is an ordinary model.

    Raises:
        CheckpointError: it is damaged.
        IncompatibleDrafterError: none ships for this target, or it was distilled for another one.
    """
    if model is not None and not isinstance(model, str | os.PathLike):
        return None
    if model is None:
        target = head_target(context.runner)
        name = shipped_for(KIND, target)
        if name is None:
            raise no_shipped(KIND, target)
        folder = SHIPPED / name
    else:
        found_in = _folder(model)
        if found_in is None:
            return None
        folder = found_in
        target = head_target(context.runner)
    key = (KIND, str(folder), state_of(folder))
    if key not in context.runner.loaded:
        small, vocabulary = load_small_model(folder, context.runner.model, target)
        context.runner.loaded[key] = SmallModel(small, vocabulary, advised_settings(folder))
    found: SmallModel = context.runner.loaded[key]
    return found


def _folder(model: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the distilled draft model that `model` names, or None if it names something else."""
    folder = SHIPPED / model if model in shipped_names() else Path(model).expanduser()
    if not folder.exists() and is_hub_id(model):
        config = hub_config(str(model))
        return find_folder(model) if config is not None and is_small_model(config.parent) else None
    return folder if is_small_model(folder) else None
