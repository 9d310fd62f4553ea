"""EAGLE-3 as the package `speculators` writes it, which is vLLM's own format."""

from __future__ import annotations

from specdec.errors import CheckpointError
from specdec.heads.checkpoint import Checkpoint
from specdec.heads.config_fields import ConfigFields
from specdec.heads.eagle import EagleConfig
from specdec.heads.layouts.eagle3 import check_layers, default_layers, from_hidden_state_ids
from specdec.heads.layouts.llama_config import check_hidden_size, decoder_options, plain_names
from specdec.heads.layouts.reading import Layout, Reading, always
from specdec.heads.layouts.vocabulary_maps import from_offsets
from specdec.heads.target import HeadTarget

_IDS = "eagle_aux_hidden_state_layer_ids"
_TARGETS = ("verifier_lm_head.weight", "verifier_norm.weight", "verifier_lm_head", "verifier_norm")


def _recognises(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.text("speculators_model_type", "") == "eagle3"


def _read(checkpoint: Checkpoint, target: HeadTarget) -> Reading:
    fields = checkpoint.config
    found = {name: f for name, f in plain_names(checkpoint.names).items() if name not in _TARGETS}
    layer = fields.inner("transformer_layer_config")
    if layer.text("model_type", "qwen3") not in ("llama", "qwen3"):
        raise CheckpointError(f"{layer.where}: model_type={layer.text('model_type')!r}; allowed: 'llama', 'qwen3'")
    options = decoder_options(layer, found, target)
    options["attention_bias"] = options["output_bias"] = layer.flag("attention_bias", options["attention_bias"])
    options["qk_norm"] = layer.text("model_type", "qwen3") == "qwen3"
    _check_width(fields, options["hidden_size"], target)
    draft_size = fields.integer("draft_vocab_size", target.vocab_size)
    ids = fields.integers(_IDS)
    layers = default_layers(target.num_layers) if ids is None else from_hidden_state_ids(ids)
    config = EagleConfig(
        generation=3,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_size,
        feature_layers=check_layers(layers, target, f"{fields.where} ({_IDS}, counted from the embedding)"),
        fc_norm=fields.flag("fc_norm", "fc_norm.0.weight" in found),
        norm_before_fc=fields.flag("norm_before_fc", "input_norm.weight" in found),
        norm_before_residual=_norm_before_residual(fields),
        norm_output=fields.flag("norm_output", False),
        **options,
    )
    rows = from_offsets(checkpoint, found, draft_size, target)
    problems = list(rows.problems)
    if "lm_head.weight" not in found:
        problems.append(f"lm_head.weight is missing; expected ({draft_size}, {config.hidden_size})")
    return Reading(
        config=config,
        vocabulary=rows.vocabulary,
        found=found,
        file_name=lambda name: name,
        output_rows=draft_size,
        row_ids=rows.row_ids,
        own_embedding=bool(fields.flag("embed_requires_grad", False)),
        problems=problems,
        settings=_settings(fields),
    )


def _check_width(fields: ConfigFields, hidden_size: int, target: HeadTarget) -> None:
    width = fields.integer("target_hidden_size", hidden_size)
    check_hidden_size(width, target, f"{fields.where}: hidden size of the target")


def _norm_before_residual(fields: ConfigFields) -> bool:
    flag = fields.flag("norm_before_residual", None)
    if flag is None:
        raise CheckpointError(
            f"{fields.where} has no 'norm_before_residual', and readers of this layout disagree about its default. "
            "Write the flag that the head was trained with: true if it was by speculators' command line, false if it "
            "is a conversion of a published EAGLE-3 head"
        )
    return flag


def _settings(fields: ConfigFields) -> dict[str, int]:
    """Return the advised length of the drafted chain."""
    proposals = fields.inner("speculators_config").values.get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    length = first.get("speculative_tokens") if isinstance(first, dict) else None
    return {"max_draft_tokens": length} if type(length) is int and length > 0 else {}


SPECULATORS = Layout("eagle3-speculators", "EAGLE-3 of speculators", always("eagle3"), _recognises, _read)
