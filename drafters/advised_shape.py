"""What a checkpoint advises about the shape of its drafts. Shared by drafters that run one; drafts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.interfaces import DrafterContext

TREE_TOKENS = 16  # draft tokens of a tree that nobody gave a number of


def advised_shape(
    settings: Mapping[str, Any], context: DrafterContext, tree: Any, default: Any = "chain"
) -> tuple[Any, int | None]:
    """Return the option `tree` and, where the shape is the checkpoint's own advice, how many draft tokens go with it.

    Args:
        settings: of the checkpoint, such as tree and max_draft_tokens.
        context: of the target; one that runs chains only is not advised trees.
        tree: what the caller says; None = what the checkpoint advises.
        default: of checkpoints that advise no shape.
    """
    if tree is not None:
        return tree, None
    tree = settings.get("tree", default)
    if isinstance(tree, str) and tree == "chain":
        return tree, settings.get("max_draft_tokens")
    if not context.runner.supports_trees:
        return "chain", None
    return tree, settings.get("max_draft_tokens", TREE_TOKENS)
