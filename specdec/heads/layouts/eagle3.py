"""EAGLE-3 as published, and as SGLang, SpecForge and vLLM read and write it: `midlayer.*` and a llama config."""

from __future__ import annotations

from specdec.errors import CheckpointError, IncompatibleDrafterError
from specdec.heads.checkpoint import Checkpoint
from specdec.heads.config_fields import ConfigFields
from specdec.heads.eagle import EagleConfig
from specdec.heads.layouts.llama_config import check_hidden_size, decoder_options, plain_names
from specdec.heads.layouts.reading import Layout, Reading, always
from specdec.heads.layouts.vocabulary_maps import from_offsets
from specdec.heads.target import HeadTarget

_IDS = "eagle_aux_hidden_state_layer_ids"


def default_layers(num_layers: int) -> list[int]:
    """Return the blocks whose outputs EAGLE-3 fuses unless it says otherwise.

    Source: SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py: taken before blocks 2, n/2 and n - 3.
    """
    return [1, num_layers // 2 - 1, num_layers - 4]


def from_hidden_state_ids(ids: list[int]) -> list[int]:
    """Return blocks from places in transformers' `hidden_states`, of which the first is the embedding."""
    return [i - 1 for i in ids]


def check_layers(layers: list[int], target: HeadTarget, where: str) -> tuple[int, ...]:
    """Return the blocks whose outputs are fused.

    Raises:
        IncompatibleDrafterError: the target has no such block.
    """
    outside = [layer for layer in layers if not 0 <= layer < target.num_layers]
    if outside:
        raise IncompatibleDrafterError(
            f"{where}: the head fuses the outputs of blocks {layers} (0 = the first), and {target.name} has "
            f"{target.num_layers} blocks; no block {', '.join(map(str, outside))}"
        )
    return tuple(layers)


def feature_layers(fields: ConfigFields, target: HeadTarget) -> tuple[int, ...]:
    """Return the blocks of a llama-like config: SGLang's ids are blocks, vLLM's are places in `hidden_states`."""
    inner = fields.inner("eagle_config")
    if inner.flag("use_aux_hidden_state", True) is False:
        raise CheckpointError(
            f"{inner.where}: use_aux_hidden_state=false; heads that read the last hidden state alone are not supported "
            "in this layout"
        )
    blocks = inner.integers(_IDS)
    if blocks is not None:
        return check_layers(blocks, target, inner.where)
    places = fields.integers(_IDS)
    layers = default_layers(target.num_layers) if places is None else from_hidden_state_ids(places)
    return check_layers(layers, target, fields.where)


def _found(checkpoint: Checkpoint) -> dict[str, str]:
    """Return our names -> names in the file."""
    plain = plain_names(checkpoint.names)
    return {
        "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name: in_file
        for name, in_file in plain.items()
    }


def _recognises(checkpoint: Checkpoint) -> bool:
    names = plain_names(checkpoint.names)
    return any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names


def _is_sglang(checkpoint: Checkpoint) -> bool:
    return "LlamaForCausalLMEagle3" in checkpoint.config.texts("architectures")


def _read(checkpoint: Checkpoint, target: HeadTarget) -> Reading:
    fields, found = checkpoint.config, _found(checkpoint)
    options = decoder_options(fields, found, target)
    width = fields.integer("target_hidden_size", options["hidden_size"])
    check_hidden_size(width, target, f"{fields.where}: {'target_' * ('target_hidden_size' in fields)}hidden_size")
    draft_size, problems = _draft_size(checkpoint, found, target)
    config = EagleConfig(
        generation=3,
        target_hidden_size=width,
        draft_vocab_size=draft_size,
        feature_layers=feature_layers(fields, target),
        fc_bias="fc.bias" in found,
        fc_norm=fields.flag("fc_norm", "fc_norm.0.weight" in found),
        norm_before_fc=fields.flag("norm_before_fc", "input_norm.weight" in found),
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_output=fields.flag("norm_output", False),
        **options,
    )
    rows = from_offsets(checkpoint, found, draft_size, target)
    midlayer = not any(name.removeprefix("model.").startswith("layers.0.") for name in checkpoint.names)
    prefix = "model." if all(name.startswith("model.") for name in checkpoint.names) else ""

    def file_name(name: str) -> str:
        return prefix + (
            "midlayer." + name.removeprefix("layers.0.") if midlayer and name.startswith("layers.0.") else name
        )

    return Reading(
        config=config,
        vocabulary=rows.vocabulary,
        found=found,
        file_name=file_name,
        output_rows=draft_size,
        row_ids=rows.row_ids,
        problems=problems + rows.problems,
    )


def _draft_size(checkpoint: Checkpoint, found: dict[str, str], target: HeadTarget) -> tuple[int, list[str]]:
    """Return Vd. Without `draft_vocab_size` the head ends in the target's whole lm_head, unless it has rows."""
    fields, shapes = checkpoint.config, checkpoint.weights.shapes
    tied = fields.flag("tie_word_embeddings", False)
    if "lm_head.weight" in found:
        rows = shapes[found["lm_head.weight"]]
        return fields.integer("draft_vocab_size", rows[0] if rows else target.vocab_size), []
    size = fields.integer("draft_vocab_size", target.vocab_size)
    if "draft_vocab_size" not in fields or (tied and size == target.vocab_size):
        if tied and not getattr(target.config, "tie_word_embeddings", False):
            raise CheckpointError(
                f"{fields.where}: tie_word_embeddings=true, so the head ends in its embedding, and {target.name} has "
                "an lm_head apart from it; write lm_head.weight into the file"
            )
        return size, []
    return size, [f"lm_head.weight is missing; expected ({size}, {fields.integer('hidden_size')})"]


EAGLE3_LAYOUTS = (
    Layout("eagle3-sglang", "EAGLE-3 of SGLang and SpecForge", always("eagle3"), _is_sglang, _read),
    Layout("eagle3", "EAGLE-3 as published", always("eagle3"), _recognises, _read),
)
