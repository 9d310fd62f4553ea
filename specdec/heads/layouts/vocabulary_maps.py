"""Draft vocabularies as layouts store them: offsets with a mask, or a list of the target's ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.errors import CheckpointError, IncompatibleDrafterError
from specdec.heads.checkpoint import Checkpoint
from specdec.heads.draft_vocabulary import DraftVocabulary, whole_vocabulary
from specdec.heads.target import HeadTarget


@dataclass(frozen=True, slots=True)
class MappedRows:
    """A vocabulary in increasing order, and which row of the file's lm_head each draft id has."""

    vocabulary: DraftVocabulary
    row_ids: Tensor | None = None  # [Vd]; None = as they stand
    problems: list[str] = field(default_factory=list)


def check_vocab_size(found: int, target: HeadTarget, what: str) -> None:
    """Raise IncompatibleDrafterError unless a head is for as many tokens as its target has."""
    if found != target.vocab_size:
        raise IncompatibleDrafterError(
            f"{what} is for {found} tokens and {target.name} has {target.vocab_size}; the head was trained for another "
            "model, or the target's embedding was resized since"
        )


def from_offsets(checkpoint: Checkpoint, found: dict[str, str], draft_size: int, target: HeadTarget) -> MappedRows:
    """Return the vocabulary of `d2t` [Vd] and `t2d` [V], taking both out of `found`.

    Raises:
        CheckpointError: they are out of range, disagree or are no integers.
        IncompatibleDrafterError: they are for another number of tokens.
    """
    names = {key: found.pop(key) for key in ("d2t", "t2d") if key in found}
    if "d2t" not in names:
        if draft_size == target.vocab_size:
            return MappedRows(whole_vocabulary(draft_size))
        problem = f"d2t is missing; expected ({draft_size},), integers: the head drafts {draft_size} tokens of "
        return MappedRows(whole_vocabulary(target.vocab_size), None, [problem + f"{target.vocab_size}"])
    shape = checkpoint.weights.shapes[names["d2t"]]
    if shape != (draft_size,):
        problem = f"{names['d2t']} has shape {shape}, expected ({draft_size},)"
        return MappedRows(whole_vocabulary(target.vocab_size), None, [problem])
    d2t, t2d = (checkpoint.weights.read(names[key]) if key in names else None for key in ("d2t", "t2d"))
    assert d2t is not None, "looked up above"
    if t2d is not None and t2d.ndim == 1:
        check_vocab_size(t2d.shape[0], target, names["t2d"])
    _refuse_floats(d2t, names["d2t"])
    vocabulary = DraftVocabulary.from_offsets(d2t, target.vocab_size, t2d)
    return in_order(vocabulary.target_ids, target)


def from_ids(ids: Tensor, name: str, target: HeadTarget) -> MappedRows:
    """Return the vocabulary of a list of target ids [Vd].

    Raises:
        CheckpointError: they are out of range or no integers.
    """
    _refuse_floats(ids, name)
    return in_order(ids.to(torch.int64), target)


def in_order(target_ids: Tensor, target: HeadTarget) -> MappedRows:
    """Return the vocabulary of target ids [Vd] in increasing order."""
    ordered, row_ids = target_ids.sort()
    is_sorted = bool((ordered == target_ids).all())
    return MappedRows(DraftVocabulary(ordered, target.vocab_size), None if is_sorted else row_ids)


def _refuse_floats(ids: Tensor, name: str) -> None:
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise CheckpointError(
            f"{name} is stored as {str(ids.dtype).removeprefix('torch.')}, which cannot hold token ids; int32 or int64 "
            "is expected: a conversion of the head has cast it along with the weights"
        )
