"""Medusa as vLLM reads it: `blocks.*` and `lm_heads.*`, with a cut vocabulary if wanted."""

from __future__ import annotations

import re

from specdec.errors import CheckpointError
from specdec.heads.checkpoint import Checkpoint
from specdec.heads.draft_vocabulary import whole_vocabulary
from specdec.heads.layouts.llama_config import check_hidden_size, plain_names
from specdec.heads.layouts.reading import Layout, Reading, always
from specdec.heads.layouts.vocabulary_maps import MappedRows, check_vocab_size, from_ids
from specdec.heads.medusa import MedusaConfig
from specdec.heads.same_target import is_targets_output
from specdec.heads.target import HeadTarget

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_SHARED = ("lm_head.weight", "lm_heads.0.weight")  # either name


def _recognises(checkpoint: Checkpoint) -> bool:
    return any(_BLOCK.fullmatch(name) for name in plain_names(checkpoint.names, "medusa_heads."))


def _read(checkpoint: Checkpoint, target: HeadTarget) -> Reading:
    fields, shapes = checkpoint.config, checkpoint.weights.shapes
    plain = plain_names(checkpoint.names, "medusa_heads.")
    check_hidden_size(fields.integer("hidden_size"), target, f"{fields.where}: hidden_size")
    check_vocab_size(fields.integer("vocab_size"), target, f"{fields.where} (vocab_size)")
    if fields.number("logit_scale", 1.0) != 1.0:
        raise CheckpointError(f"{fields.where}: logit_scale={fields.number('logit_scale')}; allowed: 1")
    rows = _draft_rows(checkpoint, plain, target)
    shared = fields.flag("original_lm_head", False)
    size = rows.vocabulary.size
    lm_heads = [name for name in plain if name.startswith("lm_head")]
    in_file = shapes[plain[lm_heads[0]]] if lm_heads else (size,)
    cut = len(in_file) > 0 and in_file[0] == target.vocab_size != size  # whole rows, which vLLM cuts itself
    row_ids = rows.vocabulary.target_ids if cut else rows.row_ids
    problems = list(rows.problems)
    if shared:
        problems += _check_shared(checkpoint, plain, rows, cut, target)
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        num_heads=fields.integer("num_heads"),
        num_layers=fields.integer("num_hidden_layers", 1),
        own_heads=not shared,
        block_bias=fields.flag("medusa_fc_bias", any(name.endswith(".bias") for name in plain)),
    )
    return Reading(
        config=config,
        vocabulary=rows.vocabulary,
        found={_BLOCK.sub(r"blocks.\1.\2.linear.\3", name): in_file for name, in_file in plain.items()},
        file_name=lambda name: re.sub(r"blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name),
        output_rows=target.vocab_size if cut else size,
        row_ids=row_ids,
        problems=problems,
    )


def _draft_rows(checkpoint: Checkpoint, plain: dict[str, str], target: HeadTarget) -> MappedRows:
    size = checkpoint.config.integer("truncated_vocab_size", target.vocab_size)
    name = plain.pop("token_map", None)
    if size == target.vocab_size:
        return MappedRows(whole_vocabulary(size))
    if name is None:
        missing = f"token_map is missing; expected ({size},), integers"
        return MappedRows(whole_vocabulary(target.vocab_size), None, [missing])
    rows = from_ids(checkpoint.weights.read(name), name, target)
    if rows.vocabulary.size != size:
        rows.problems.append(f"{name} has shape ({rows.vocabulary.size},), expected ({size},)")
    return rows


def _check_shared(
    checkpoint: Checkpoint, plain: dict[str, str], rows: MappedRows, cut: bool, target: HeadTarget
) -> list[str]:
    """Take the one lm_head of all heads out of `plain`: it is the target's, of which the file has a copy."""
    names = [plain.pop(name) for name in _SHARED if name in plain]
    for name in names:
        shape, size = checkpoint.weights.shapes[name], rows.vocabulary.size
        if shape != (target.vocab_size if cut else size, target.hidden_size):
            return [f"{name} has shape {shape}, expected {(size, target.hidden_size)}"]
        ids = rows.vocabulary.target_ids
        if rows.row_ids is not None and not cut:  # back into the file's order
            ids = ids[rows.row_ids.argsort()]
        if cut:
            ids = whole_vocabulary(target.vocab_size).target_ids
        if not is_targets_output(checkpoint.weights, name, ids, target):
            raise CheckpointError(
                f"{name} is not the lm_head of {target.name}, though original_lm_head says that the heads share it: it "
                "was trained on. Write it out as lm_heads.0 to lm_heads.N with original_lm_head=false"
            )
    return []


MEDUSA_VLLM = Layout("medusa-vllm", "Medusa of vLLM", always("medusa"), _recognises, _read)
