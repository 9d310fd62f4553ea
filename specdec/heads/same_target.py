"""Whether a tensor in a head's file is a copy of its target's, another target's, or the head's own."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import CheckpointError, IncompatibleDrafterError
from specdec.heads.target import HeadTarget
from specdec.heads.weight_files import WeightFiles

_ROWS = 64  # compared, spread over the vocabulary
# Mean cosine of a row and the target's: half precision and 4-bit quantisation stay above the first, rows that were
# trained on stay above the second, and other models' rows are near zero.
_COPY, _RELATED = 0.98, 0.5


def is_targets_embedding(weights: WeightFiles, name: str, target: HeadTarget) -> bool:
    """Tell whether `name` [V, H] is the target's embedding. False: it was trained on since.

    Raises:
        CheckpointError: its rows are all zero.
        IncompatibleDrafterError: it is another target's.
    """
    ids = torch.linspace(0, target.vocab_size - 1, min(_ROWS, target.vocab_size)).long().unique()
    with torch.no_grad():
        own = target.embedding(ids.to(target.device))
    return _compare(weights.rows(name, ids), own, name, "embedding", target)


def is_targets_output(weights: WeightFiles, name: str, target_ids: Tensor, target: HeadTarget) -> bool:
    """Tell whether `name` [n, H] holds the target's lm_head rows of `target_ids` [n].

    Raises:
        CheckpointError: its rows are all zero.
        IncompatibleDrafterError: they are another target's.
    """
    if target.output_weight is None:
        return False
    at = torch.linspace(0, len(target_ids) - 1, min(_ROWS, len(target_ids))).long().unique()
    return _compare(weights.rows(name, at), target.output_rows(target_ids[at]), name, "lm_head", target)


def _compare(found: Tensor, own: Tensor, name: str, part: str, target: HeadTarget) -> bool:
    found, own = found.float().cpu(), own.detach().float().cpu()
    used = (found.norm(dim=-1) > 1e-6) & (own.norm(dim=-1) > 1e-6)  # rows of padding may be zero
    if not bool(used.any()):
        raise CheckpointError(f"{name} is damaged: the {len(found)} rows that were looked at are zero")
    cosine = float(torch.cosine_similarity(found[used], own[used], dim=-1).mean())
    if not cosine > _RELATED:  # NaN too
        raise IncompatibleDrafterError(
            f"{name} is not the {part} of {target.name}: {int(used.sum())} rows that were compared have a mean cosine "
            f"similarity of {cosine:.3f} with the target's, and a copy has 1; the head was trained for another model"
        )
    return cosine > _COPY
