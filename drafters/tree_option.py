"""The option `tree=` of drafters whose model runs tree by tree, and growing what it names. Drafts nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor

from specdec.drafters import static_growth
from specdec.drafters.dynamic_tree import DynamicTree, grow
from specdec.drafters.growing_trees import Expand, Grown
from specdec.drafters.static_growth import grow_sampled, grow_static
from specdec.drafters.static_tree import ALLOWED, StaticTree, static_tree
from specdec.errors import ConfigError
from specdec.interfaces import DraftRequest, Noise
from specdec.registry import refuse_unknown

Shape = StaticTree | DynamicTree
T = TypeVar("T", bound=Any)


def tree_option(tree: Any, sampled: bool = False) -> Shape | None:
    """Return the shape that an option names; None = chains.

    Args:
        tree: "chain"; what `static_tree` takes; "dynamic", or a dict of the fields of `DynamicTree`, for trees that
            grow where the draft is sure.
        sampled: children are drawn, siblings without replacement; static trees only.

    Raises:
        ConfigError: it is none of these, or cannot be sampled.
    """
    shape = named_shape(tree, "dynamic", DynamicTree)
    if not isinstance(sampled, bool):
        raise ConfigError(f"sampled={sampled!r}; allowed: True or False")
    if sampled and not isinstance(shape, StaticTree):
        what = "a chain is drawn anyway" if shape is None else "the likeliest nodes of a dynamic tree are not drawn"
        raise ConfigError(f"sampled=True goes with a static tree, and {what}; leave it out or give another tree=")
    return shape


def named_shape(tree: Any, name: str, kind: type[T]) -> StaticTree | T | None:
    """Return the shape that an option names: `name` or a dict of its fields for a `kind`, or a static tree.

    None = "chain".

    Raises:
        ConfigError: it is none of these, or a field is unknown or out of range.
    """
    if isinstance(tree, str) and tree == "chain":
        return None
    if isinstance(tree, str) and tree == name:
        return kind()
    if isinstance(tree, StaticTree | kind):
        return tree
    names = [f.name for f in fields(kind)]
    if isinstance(tree, dict):
        refuse_unknown("tree", tree, names)
        return kind(**tree)
    try:
        return static_tree(tree)
    except ConfigError as error:
        allowed = f"'chain', {name!r}, a dict of {', '.join(names)}, {ALLOWED}"
        raise ConfigError(str(error).replace(ALLOWED, allowed)) from None


def num_rows(shape: Shape, max_draft_tokens: int) -> int:
    """Return the most tokens that growing runs through the model, root included: what to reserve KV for."""
    if isinstance(shape, DynamicTree):
        return shape.num_rows(max_draft_tokens)
    return static_growth.num_rows(shape, max_draft_tokens)


def grow_shape(
    requests: Sequence[DraftRequest],
    shape: Shape,
    expand: Expand,
    vocab_size: int,
    noise: Noise | None = None,
    draft_ids: Tensor | None = None,
) -> Grown:
    """Grow trees of a shape.

    Args:
        requests: B requests.
        shape: of their largest tree.
        expand: runs the drafter's model.
        vocab_size: V of the target.
        noise: of this step, if children are drawn.
        draft_ids: [Vd] int64, the target's id of each draft id, if the drafter has a vocabulary of its own.
    """
    if isinstance(shape, DynamicTree):
        return grow(requests, shape, expand, vocab_size, draft_ids)
    if noise is None:
        return grow_static(requests, shape, expand, vocab_size, draft_ids)
    return grow_sampled(requests, shape, expand, noise, vocab_size, draft_ids)
