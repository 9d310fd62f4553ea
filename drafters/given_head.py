"""The option `model=` of drafters that run a trained head: which head it names. Shared by drafters; drafts nothing."""

from __future__ import annotations

import os
from typing import Any

from specdec.errors import ConfigError, IncompatibleDrafterError
from specdec.heads.checkpoint import find_folder, state_of
from specdec.heads.eagle import EagleConfig
from specdec.heads.loaded import LoadedHead
from specdec.heads.loading import load_head
from specdec.heads.shipped_heads import no_shipped, shipped_for
from specdec.heads.target import head_target
from specdec.interfaces import DrafterContext


def given_head(name: str, context: DrafterContext, model: Any) -> LoadedHead:
    """Return the head that the option names, for the target of `context`; files are read once per target.

    Args:
        name: of the drafter.
        context: of the target.
        model: a directory, a hub id, the name of a shipped head, or a LoadedHead; None = the head that is shipped for
            this target.

    Raises:
        ConfigError: the option is none of these.
        CheckpointError: the head cannot be read.
        IncompatibleDrafterError: none is shipped for this target, or the head is another drafter's or target's.
    """
    target = head_target(context.runner)
    if isinstance(model, LoadedHead):
        head = model
    elif model is None or isinstance(model, str | os.PathLike):
        source = shipped_for(name, target) if model is None else model
        if source is None:
            raise no_shipped(name, target)
        key = ("head", os.fspath(source), state_of(find_folder(source)))
        if key not in context.runner.loaded:
            context.runner.loaded[key] = load_head(source, target)
        head = context.runner.loaded[key]
    else:
        raise ConfigError(
            f"drafter {name!r}: model is a {type(model).__name__}; allowed: a directory, a hub id, the name of a head "
            "that ships with specdec, or a LoadedHead"
        )
    kind = _kind(head)
    if kind != name:
        raise IncompatibleDrafterError(f"drafter {name!r}: {head.source} is for drafter={kind!r}; use that one")
    config = head.module.config
    width = config.target_hidden_size if isinstance(config, EagleConfig) else config.hidden_size
    found, wanted = (width, config.vocab_size), (target.hidden_size, context.vocab_size)
    if found != wanted:
        raise IncompatibleDrafterError(
            f"drafter {name!r}: {head.source} is for a target of hidden size {found[0]} and {found[1]} tokens; "
            f"{target.name} has {wanted[0]} and {wanted[1]}. Use a head that was trained for it"
        )
    parameter = next(head.module.parameters(), None)  # Medusa heads without blocks may have none
    if parameter is not None and (parameter.dtype != target.dtype or parameter.device != target.device):
        raise IncompatibleDrafterError(
            f"drafter {name!r}: {head.source} was loaded as {parameter.dtype} on {parameter.device} and the target is "
            f"{target.dtype} on {target.device}; load it for this target"
        )
    return head


def _kind(head: LoadedHead) -> str:
    """Return the registered name of the drafter that a head is for."""
    config = head.module.config
    if isinstance(config, EagleConfig):
        return "eagle3" if config.generation == 3 else "eagle"
    return "medusa"
