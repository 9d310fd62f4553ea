"""A head that is ready to draft: its module with everything it shares with the target, and its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.eagle import EagleHead
from specdec.heads.medusa import MedusaHeads
from specdec.heads.target import HeadTarget


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """What a drafter is built from. The module is in eval mode, in the target's dtype and on its device."""

    module: EagleHead | MedusaHeads
    vocabulary: DraftVocabulary
    source: str  # folder or hub id, for messages
    layout: str  # the name of the file layout it was read from, see docs/checkpoints.md
    settings: dict[str, Any] = field(default_factory=dict)  # what the checkpoint advises: tree, max_draft_tokens

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return every weight it drafts with but the target's embedding; rows of its lm_head may be a copy."""
        output = getattr(self.module, "lm_head", None)
        return [*self.module.parameters(), *([output.weight] if isinstance(output, _Rows) else [])]


def share_with_target(module: EagleHead | MedusaHeads, vocabulary: DraftVocabulary, target: HeadTarget) -> None:
    """Give a head the parts it shares with its target: embedding and output rows. They are not copied if whole.

    Raises:
        IncompatibleDrafterError: the target's lm_head cannot be shared.
    """
    if isinstance(module, EagleHead) and module.shares_embedding:
        module.embed_tokens = _Borrowed(target.embedding)
    needs_rows = module.shares_lm_head if isinstance(module, EagleHead) else not module.config.own_heads
    if needs_rows:
        # A target spread over devices has its lm_head elsewhere than the head.
        module.lm_head = _Rows(target.output_rows(vocabulary.target_ids).to(target.device))


class _Rows:
    """[..., H] -> [..., n] by rows [n, H] that are somebody else's parameters."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rows:
        return self  # somebody else's: a copy of the head shares it too

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class _Borrowed:
    """Keeps a module out of its borrower's parameters: what belongs to the target is neither saved nor trained."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __deepcopy__(self, memo: dict[int, Any]) -> _Borrowed:
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.of(x)
        return out
