"""What reading a layout comes to: a head's config, its vocabulary, and which tensor of the file is which of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specdec.heads.checkpoint import Checkpoint
from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.eagle import EagleConfig
from specdec.heads.medusa import MedusaConfig
from specdec.heads.target import HeadTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A checkpoint in terms of our modules. Nothing but names, shapes and vocabulary maps has been read."""

    config: EagleConfig | MedusaConfig
    vocabulary: DraftVocabulary
    found: dict[str, str]  # name in our module, or what it would be -> name in the file
    file_name: Callable[[str], str]  # our name -> what the layout calls it, for tensors that are missing
    output_rows: int  # rows that lm_head has in the file
    row_ids: Tensor | None = None  # [Vd] which of those rows belongs to each draft id; None = all, in order
    own_embedding: bool = False  # the embedding was trained: it is used even if it is close to the target's
    borrows_output: bool = False  # a layout whose lm_head is a copy of the target's, if it has one
    problems: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of writing a head down."""

    name: str  # as in docs/checkpoints.md
    title: str
    kind: Callable[[Checkpoint], str]  # the registered name of the drafter
    recognises: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint, HeadTarget], Reading]


def always(kind: str) -> Callable[[Checkpoint], str]:
    """Return the `kind` of a layout that holds one kind only."""
    return lambda checkpoint: kind
