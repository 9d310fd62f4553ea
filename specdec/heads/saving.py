"""Trained heads in specdec's own layout: model.safetensors, config.json and a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.eagle import EagleHead
from specdec.heads.medusa import MedusaHeads
from specdec.heads.target import HeadTarget
from specdec.heads.writing import cast, write_checkpoint

FORMAT, FORMAT_VERSION = "specdec-head", 1
DRAFT_IDS = "draft_ids"


def save_head(
    folder: Path | str,
    module: EagleHead | MedusaHeads,
    vocabulary: DraftVocabulary,
    target: HeadTarget,
    *,
    settings: Mapping[str, Any] | None = None,
    card: str | None = None,
    dtype: torch.dtype = torch.float16,
) -> Path:
    """Write a head so that `load_head` reads it back, and return its folder.

    What the head shares with its target, embedding and output rows, is not written.

    Args:
        folder: made if missing. A head that stands there is replaced at the end; other files are left alone.
        module: the head; its weights are stored in `dtype`.
        vocabulary: which of the target's tokens it drafts.
        target: whose head it is.
        settings: advised options of the drafter, such as tree and max_draft_tokens.
        card: the text of README.md; a short one is written where it is None.
        dtype: of the stored weights.

    Raises:
        CheckpointError: a weight has no finite value in `dtype`, or the folder cannot be written. Then nothing was
            changed there.
    """
    kind = "eagle" if isinstance(module, EagleHead) else "medusa"
    config = described(kind, asdict(module.config), target, settings)
    tensors = cast(own_tensors(module), dtype)
    if not vocabulary.is_whole:
        tensors[DRAFT_IDS] = vocabulary.target_ids.to(torch.int32)
    return write_checkpoint(folder, tensors, config, card or _short_card(kind, target))


def described(
    kind: str, head: Mapping[str, Any], target: HeadTarget, settings: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the config.json of a drafter in this layout.

    Args:
        kind: of drafter.
        head: what its module is built from.
        target: whose drafter it is.
        settings: advised options.
    """
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "head": dict(head),
        "target": {
            "name": target.name,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "probe": target.probe(),
        },
        "settings": dict(settings or {}),
    }


def own_tensors(module: EagleHead | MedusaHeads) -> dict[str, Tensor]:
    """Return the head's weights without those that are its target's."""
    shared = []
    if isinstance(module, EagleHead):
        shared += ["embed_tokens."] if module.shares_embedding else []
        shared += ["lm_head."] if module.shares_lm_head else []
    else:
        shared.append("lm_head.")  # heads of their own are lm_heads
    return {name: t for name, t in module.state_dict().items() if not name.startswith(tuple(shared) or "\0")}


def _short_card(kind: str, target: HeadTarget) -> str:
    return (
        f"# {'EAGLE' if kind == 'eagle' else 'Medusa'} head for {target.name}\n\n"
        f"A drafter for speculative decoding with specdec. Its target has hidden size {target.hidden_size} and "
        f"{target.vocab_size} tokens.\n"
    )
