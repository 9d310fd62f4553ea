"""What a trained drafter may advise about its own use, checked before it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.drafters.rank_trees import ProductTree
from specdec.drafters.static_tree import StaticTree
from specdec.drafters.tree_option import named_shape, tree_option
from specdec.errors import ConfigError
from specdec.registry import refuse_unknown
from specdec.train.new_heads import MEDUSA_HEADS

ADVISED = ("tree", "max_draft_tokens")


def check_advice(
    method: str, settings: Mapping[str, Any], options: Mapping[str, Any], draft_vocab_size: int | None
) -> None:
    """Refuse settings that the drafter of a method could not be built with.

    Raises:
        ConfigError: one is unknown, of the wrong type or out of range.
    """
    refuse_unknown(f"specdec train {method}: settings", settings, ADVISED)
    most = settings.get("max_draft_tokens", 1)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ConfigError(f"settings.max_draft_tokens={most!r}; allowed: an integer >= 1")
    tree = settings.get("tree")
    if tree is None:
        return
    try:
        shape = named_shape(tree, "best", ProductTree) if method == "medusa" else tree_option(tree)
    except ConfigError as error:
        raise ConfigError(f"settings.{error}") from error
    if not isinstance(shape, StaticTree):
        return
    num_heads = options.get("num_heads", MEDUSA_HEADS)
    if method == "medusa" and shape.depth > num_heads:
        raise ConfigError(
            f"settings.tree={tree!r} is {shape.depth} deep, and options.num_heads={num_heads} heads guess no further "
            "than that; take a smaller tree or more heads"
        )
    if draft_vocab_size is not None and shape.width > draft_vocab_size:
        raise ConfigError(
            f"settings.tree={tree!r} takes the {shape.width} likeliest tokens, and draft_vocab_size="
            f"{draft_vocab_size}; take a smaller tree or more tokens"
        )
