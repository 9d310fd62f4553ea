"""A draft vocabulary smaller than the target's: which of the target's tokens a head can draft."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import CheckpointError


class DraftVocabulary:
    """Draft id -> target id, increasing. None of either means that both are the same.

    Checkpoints store it as `d2t` [Vd] int64, offsets (target id = draft id + d2t), and `t2d` [V] bool, true for the
    target's ids that can be drafted.

    Args:
        target_ids: [Vd] int64.
        vocab_size: V of the target.

    Raises:
        CheckpointError: an id is outside the target's vocabulary, or stands there twice.
    """

    def __init__(self, target_ids: Tensor, vocab_size: int) -> None:
        bad = target_ids[(target_ids < 0) | (target_ids >= vocab_size)]
        if bad.numel():
            raise CheckpointError(
                f"the draft vocabulary maps {bad.numel()} ids outside the target's {vocab_size}, the first to "
                f"{int(bad[0])}; this head is for another target, or its d2t is damaged"
            )
        if target_ids.unique().numel() != target_ids.numel():
            raise CheckpointError("the draft vocabulary maps two draft ids to one target id; its d2t is damaged")
        self.target_ids, self.vocab_size = target_ids, vocab_size

    @classmethod
    def from_offsets(cls, d2t: Tensor, vocab_size: int, t2d: Tensor | None = None) -> DraftVocabulary:
        """Return the vocabulary of a checkpoint's `d2t` [Vd], checked against its `t2d` [V] if there is one.

        Raises:
            CheckpointError: they are out of range or disagree.
        """
        found = cls(d2t.to(torch.int64) + torch.arange(d2t.shape[0]), vocab_size)
        if t2d is not None and (t2d.shape != (vocab_size,) or not torch.equal(found.t2d, t2d.to(torch.bool))):
            raise CheckpointError(
                f"t2d {tuple(t2d.shape)} marks {int(t2d.sum())} tokens and d2t maps {d2t.shape[0]} others; one of them "
                "is damaged, or the head is for another target"
            )
        return found

    @property
    def size(self) -> int:
        return int(self.target_ids.shape[0])

    @property
    def is_whole(self) -> bool:
        """Whether draft and target ids are the same."""
        return self.size == self.vocab_size and bool((self.d2t == 0).all())

    @property
    def d2t(self) -> Tensor:
        """Return [Vd] int64 offsets."""
        return self.target_ids - torch.arange(self.size, device=self.target_ids.device)

    @property
    def t2d(self) -> Tensor:
        """Return [V] bool."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.target_ids.device)
        mask[self.target_ids] = True
        return mask

    @property
    def draft_id_of(self) -> Tensor:
        """Return [V] int64: the draft id of each of the target's ids, -1 if it cannot be drafted."""
        found = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=self.target_ids.device)
        found[self.target_ids] = torch.arange(self.size, device=self.target_ids.device)
        return found

    def scatter(self, logits: Tensor) -> Tensor:
        """Return [..., V] logits from [..., Vd]: a token that cannot be drafted has -inf, so probability 0."""
        if self.is_whole:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        full[..., self.target_ids] = logits
        return full


def whole_vocabulary(vocab_size: int) -> DraftVocabulary:
    """Return the draft vocabulary that is the target's."""
    return DraftVocabulary(torch.arange(vocab_size), vocab_size)
