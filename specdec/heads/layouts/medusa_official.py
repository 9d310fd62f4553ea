"""Medusa as published: residual blocks alone (legacy), with projections (v1), or inside the whole model (Medusa-2)."""

from __future__ import annotations

import re

from specdec.errors import CheckpointError
from specdec.heads.checkpoint import Checkpoint
from specdec.heads.draft_vocabulary import whole_vocabulary
from specdec.heads.layouts.llama_config import check_hidden_size
from specdec.heads.layouts.reading import Layout, Reading, always
from specdec.heads.layouts.vocabulary_maps import check_vocab_size
from specdec.heads.medusa import MedusaConfig
from specdec.heads.same_target import is_targets_embedding
from specdec.heads.target import HeadTarget

_WHOLE = "medusa_head."  # what the heads' names begin with inside the whole model
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"(\d+)\.(\d+)\.weight")
_EMBEDDING = "model.embed_tokens.weight"


def _heads(checkpoint: Checkpoint) -> dict[str, str]:
    """Return names of the heads' tensors without a prefix -> names in the file."""
    whole = any(name.startswith(_WHOLE) for name in checkpoint.names)
    return {name.removeprefix(_WHOLE): name for name in checkpoint.names if name.startswith(_WHOLE) or not whole}


def _recognises_any(checkpoint: Checkpoint) -> bool:
    return any(_BLOCK.fullmatch(name) for name in _heads(checkpoint))


def _is_whole(checkpoint: Checkpoint) -> bool:
    return any(name.startswith(_WHOLE) for name in checkpoint.names)


def _has_projections(checkpoint: Checkpoint) -> bool:
    return _recognises_any(checkpoint) and any(_PROJECTION.fullmatch(name) for name in _heads(checkpoint))


def _read(checkpoint: Checkpoint, target: HeadTarget) -> Reading:
    fields, plain, shapes = checkpoint.config, _heads(checkpoint), checkpoint.weights.shapes
    blocks = [match for name in plain if (match := _BLOCK.fullmatch(name))]
    if not blocks:
        raise CheckpointError(f"no Medusa head has a residual block; {fields.where} asks for medusa_num_heads of them")
    num_layers = fields.integer("medusa_num_layers", 1 + max(int(m[2]) for m in blocks))
    projections = [match for name in plain if (match := _PROJECTION.fullmatch(name))]
    # Early configs name fewer heads than the file has; all of those are used.
    num_heads = max(fields.integer("medusa_num_heads", 1), 1 + max(int(m[1]) for m in [*blocks, *projections]))
    a_block = plain[min(m.string for m in blocks if m[3] == blocks[-1][3])]
    check_hidden_size((shapes[a_block] or (0,))[-1], target, f"{a_block}: the heads' hidden size")
    for match in projections:
        shape = shapes[plain[match.string]]
        if len(shape) == 2 and shape[1] == target.hidden_size:
            check_vocab_size(shape[0], target, plain[match.string])
    if _EMBEDDING in shapes:  # the rest of a whole model
        check_vocab_size(shapes[_EMBEDDING][0], target, _EMBEDDING)
        is_targets_embedding(checkpoint.weights, _EMBEDDING, target)
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        own_heads=bool(projections),
        block_bias=any(m[3] == "bias" for m in blocks),
    )
    prefix = _WHOLE if _is_whole(checkpoint) else ""
    return Reading(
        config=config,
        vocabulary=whole_vocabulary(target.vocab_size),
        found={_ours(name, num_layers): in_file for name, in_file in plain.items()},
        file_name=lambda name: prefix + _theirs(name, num_layers),
        output_rows=target.vocab_size,
    )


def _ours(name: str, num_layers: int) -> str:
    projection = _PROJECTION.fullmatch(name)
    if projection and int(projection[2]) == num_layers:
        return f"lm_heads.{projection[1]}.weight"
    return f"blocks.{name}" if _BLOCK.fullmatch(name) else name


def _theirs(name: str, num_layers: int) -> str:
    projection = re.fullmatch(r"lm_heads\.(\d+)\.weight", name)
    return f"{projection[1]}.{num_layers}.weight" if projection else name.removeprefix("blocks.")


MEDUSA_LAYOUTS = (
    Layout("medusa-2", "Medusa-2, heads inside the whole model", always("medusa"), _is_whole, _read),
    Layout("medusa", "Medusa with a projection per head", always("medusa"), _has_projections, _read),
    Layout("medusa-legacy", "Medusa without projections", always("medusa"), _recognises_any, _read),
)
