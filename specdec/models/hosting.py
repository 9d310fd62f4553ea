"""Which way a transformers model runs over our cache: through its attention interface, or by a prepared mask."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from specdec.errors import UnsupportedModelError
from specdec.models.clone import clone_sharing_parameters
from specdec.models.conformance import TOLERANCE, Reference, compare
from specdec.models.hosted import AttentionNotSeenError, HostedProgram
from specdec.models.hosted_mask import MaskedProgram
from specdec.models.runner import Program

# "attention": our function stands in the model's AttentionInterface; "mask": the model attends by itself to what our
# cache returns, under a mask prepared from the plan.
Level = Literal["attention", "mask"]


@dataclass(frozen=True, slots=True)
class Hosting:
    """A model's own code over our cache, compared with the model."""

    program: Program
    clone: Any  # of the model, which the program runs
    level: Level
    tree_error: float  # largest |difference| over the largest |logit|
    chain_error: float | None  # None = not looked at, because trees conform
    tolerance: float

    @property
    def trees(self) -> bool:
        return self.tree_error <= self.tolerance  # NaN is not

    @property
    def chains(self) -> bool:
        return self.trees or (self.chain_error is not None and self.chain_error <= self.tolerance)


def host(model: Any, reference: Reference) -> Hosting:
    """Return how a copy of `model` runs over our cache and how far that is from `reference`.

    Raises:
        UnsupportedModelError: the model keeps its attention from us.
        Exception: whatever its code raises on our inputs.
    """
    if _has_attention_interface(model):
        try:
            return _try(HostedProgram, "attention", model, reference)
        except AttentionNotSeenError:
            pass
    return _try(MaskedProgram, "mask", model, reference)


def same_kind(program: Program, clone: Any) -> Program:
    """Return a program over another clone of the same model that hosts it as `program` does."""
    return MaskedProgram(clone) if isinstance(program, MaskedProgram) else HostedProgram(clone)


def _has_attention_interface(model: Any) -> bool:
    """Tell whether another attention can be plugged in; where transformers does not know, trying will tell."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    can_set = getattr(model, "_can_set_attn_implementation", None)
    return True if can_set is None else bool(can_set())


def _try(kind: type[HostedProgram] | type[MaskedProgram], level: Level, model: Any, reference: Reference) -> Hosting:
    # The caller keeps `model` as it is, for further copies; this one gets our attention.
    clone = clone_sharing_parameters(model)
    program = kind(clone)
    tolerance = TOLERANCE[reference.dtype]
    tree_error = compare(program, reference)
    chain_error = None if tree_error <= tolerance else compare(program, reference, trees=False)
    return Hosting(program, clone, level, tree_error, chain_error, tolerance)


def refuse_difference(hosting: Hosting, name: str, attention: str | None) -> None:
    """Raise UnsupportedModelError unless chains at least conform."""
    if hosting.chains:
        return
    hint = f", at least not as loaded: {attention!r} may leave out what 'eager' does" if attention == "sdpa" else ""
    raise UnsupportedModelError(
        f"{name} over specdec's KV cache differs from its own forward by {hosting.chain_error:.2g} of the largest "
        f"logit; it cannot be run exactly{hint}"
    )
