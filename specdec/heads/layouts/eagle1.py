"""EAGLE-1 and EAGLE-2, which have the same weights: as published, SGLang's, and wrapped for vLLM."""

from __future__ import annotations

from typing import Any

from specdec.errors import CheckpointError
from specdec.heads.checkpoint import Checkpoint
from specdec.heads.config_fields import ConfigFields
from specdec.heads.draft_vocabulary import whole_vocabulary
from specdec.heads.eagle import EagleConfig
from specdec.heads.layouts.llama_config import check_hidden_size, decoder_options, plain_names
from specdec.heads.layouts.reading import Layout, Reading, always
from specdec.heads.layouts.vocabulary_maps import MappedRows, from_ids
from specdec.heads.target import HeadTarget


def _recognises(checkpoint: Checkpoint) -> bool:
    has_fc = any(name.startswith("fc.") for name in plain_names(checkpoint.names))
    return has_fc or any(name.startswith("layers.0.") for name in checkpoint.names)  # a model's begin with model.


def _is_sglang(checkpoint: Checkpoint) -> bool:
    return "LlamaForCausalLMEagle" in checkpoint.config.texts("architectures")


def _is_vllm(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.text("model_type", "") == "eagle" and "model" in checkpoint.config


def _read(checkpoint: Checkpoint, target: HeadTarget) -> Reading:
    return _read_with(checkpoint, checkpoint.config, checkpoint.config, target)


def _read_wrapped(checkpoint: Checkpoint, target: HeadTarget) -> Reading:
    return _read_with(checkpoint, checkpoint.config, checkpoint.config.inner("model"), target)


def _read_with(checkpoint: Checkpoint, outer: ConfigFields, fields: ConfigFields, target: HeadTarget) -> Reading:
    found = plain_names(checkpoint.names)
    options = decoder_options(fields, found, target)
    check_hidden_size(options["hidden_size"], target, f"{fields.where}: hidden_size")
    rows = _draft_rows(checkpoint, outer, found, target)
    size = rows.vocabulary.size
    config = EagleConfig(
        generation=1,
        target_hidden_size=options["hidden_size"],
        draft_vocab_size=size,
        fc_bias=_fc_bias(outer, fields, found),
        **options,
    )
    in_file = checkpoint.weights.shapes.get(found.get("lm_head.weight", ""), (size,))
    cut = len(in_file) > 0 and in_file[0] == target.vocab_size != size  # vLLM cuts a whole lm_head itself
    return Reading(
        config=config,
        vocabulary=rows.vocabulary,
        found=found,
        file_name=_file_name(checkpoint),
        output_rows=target.vocab_size if cut else size,
        row_ids=rows.vocabulary.target_ids if cut else rows.row_ids,
        borrows_output=True,
        problems=rows.problems,
    )


def _fc_bias(outer: ConfigFields, fields: ConfigFields, found: dict[str, str]) -> bool:
    """Return whether fc has a bias: three names for the flag and two defaults, so without one the tensors decide."""
    said: dict[str, Any] = {
        name: where.flag(name, None) for where in (outer, fields) for name in ("eagle_fc_bias", "bias") if name in where
    }
    if len(set(said.values())) > 1:
        raise CheckpointError(f"{outer.where}: {said} contradict each other; leave the one that is true of fc.bias")
    return next(iter(said.values()), "fc.bias" in found)


def _draft_rows(checkpoint: Checkpoint, outer: ConfigFields, found: dict[str, str], target: HeadTarget) -> MappedRows:
    """Return the vocabulary of vLLM's `token_map`; without one it is the target's."""
    size = outer.integer("truncated_vocab_size", target.vocab_size)
    name = found.pop("token_map", None)
    if name is not None and size < target.vocab_size:
        rows = from_ids(checkpoint.weights.read(name), name, target)
        if rows.vocabulary.size != size:
            rows.problems.append(f"{name} has shape ({rows.vocabulary.size},), expected ({size},)")
        return rows
    problems = [f"token_map is missing; expected ({size},), integers"] if size != target.vocab_size else []
    return MappedRows(whole_vocabulary(target.vocab_size), None, problems)


def _file_name(checkpoint: Checkpoint) -> Any:
    """Return the function from our names to the file's: those in front of the layers' names are put before others."""
    layer = next((name for name in checkpoint.names if "layers.0." in name), "layers.0.")
    prefix = layer[: layer.index("layers.0.")]
    return lambda name: name if name.startswith(("fc.", "lm_head.")) else prefix + name


EAGLE1_LAYOUTS = (
    Layout("eagle-vllm", "EAGLE-1 and 2 wrapped for vLLM", always("eagle"), _is_vllm, _read_wrapped),
    Layout("eagle-sglang", "EAGLE-1 and 2 of SGLang", always("eagle"), _is_sglang, _read),
    Layout("eagle", "EAGLE-1 and 2 as published", always("eagle"), _recognises, _read),
)
