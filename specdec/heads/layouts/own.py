"""specdec's own layout: the module's state dict as it is, and what the head was trained for."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from specdec.errors import CheckpointError, IncompatibleDrafterError
from specdec.heads.checkpoint import Checkpoint
from specdec.heads.config_fields import ConfigFields
from specdec.heads.draft_vocabulary import whole_vocabulary
from specdec.heads.eagle import EagleConfig
from specdec.heads.layouts.eagle3 import check_layers
from specdec.heads.layouts.llama_config import check_hidden_size
from specdec.heads.layouts.reading import Layout, Reading
from specdec.heads.layouts.vocabulary_maps import MappedRows, check_vocab_size, from_ids
from specdec.heads.medusa import MedusaConfig
from specdec.heads.saving import DRAFT_IDS, FORMAT, FORMAT_VERSION
from specdec.heads.shipped_heads import kind_of_config
from specdec.heads.target import HeadTarget

_KINDS: dict[str, type[EagleConfig] | type[MedusaConfig]] = {"eagle": EagleConfig, "medusa": MedusaConfig}


def _recognises(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.text("format", "") == FORMAT


def _kind(checkpoint: Checkpoint) -> str:
    return kind_of_config({"kind": checkpoint.config.text("kind"), "head": checkpoint.config.inner("head").values})


def _read(checkpoint: Checkpoint, target: HeadTarget) -> Reading:
    outer = checkpoint.config
    version = outer.integer("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{outer.where}: format_version={version}; this specdec reads {FORMAT_VERSION}: update it"
        )
    kind = outer.text("kind")
    if kind not in _KINDS:
        raise CheckpointError(f"{outer.where}: kind={kind!r}; allowed in a head: {', '.join(_KINDS)}")
    config = _config(_KINDS[kind], outer.inner("head"))
    _check_target(config, outer.inner("target"), target)
    found = {name: name for name in checkpoint.names}
    rows = MappedRows(whole_vocabulary(target.vocab_size))
    if DRAFT_IDS in found:
        rows = from_ids(checkpoint.weights.read(found.pop(DRAFT_IDS)), DRAFT_IDS, target)
    size, problems = rows.vocabulary.size, list(rows.problems)
    if size != config.draft_vocab_size:
        what = f"has shape ({size},)" if size != target.vocab_size else "is missing"
        problems.append(f"{DRAFT_IDS} {what}; expected ({config.draft_vocab_size},), integers")
    return Reading(
        config=config,
        vocabulary=rows.vocabulary,
        found=found,
        file_name=lambda name: name,
        output_rows=config.draft_vocab_size,
        row_ids=rows.row_ids,
        own_embedding=True,
        problems=problems,
        settings=outer.inner("settings").advice(),
    )


def _config(kind: type[EagleConfig] | type[MedusaConfig], head: ConfigFields) -> EagleConfig | MedusaConfig:
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(head.values) - set(known))
    missing = [name for name, f in known.items() if f.default is f.default_factory is MISSING and name not in head]
    if unknown or missing:
        raise CheckpointError(
            f"{head.where}: unknown fields: {', '.join(unknown) or 'none'}; missing fields: "
            f"{', '.join(missing) or 'none'}"
        )
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in head.values.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise CheckpointError(f"{head.where} is damaged: {error}") from error


def _check_target(config: EagleConfig | MedusaConfig, trained_for: ConfigFields, target: HeadTarget) -> None:
    width = config.target_hidden_size if isinstance(config, EagleConfig) else config.hidden_size
    check_hidden_size(width, target, "the head's hidden size of the target")
    check_vocab_size(config.vocab_size, target, "the head")
    if isinstance(config, EagleConfig):
        check_layers(list(config.feature_layers), target, "feature_layers")
    probe = trained_for.numbers("probe")
    if not target.matches(probe):
        raise IncompatibleDrafterError(
            f"the head was trained for {trained_for.text('name', 'another model')}, and {target.name} is another model "
            f"of the same shape: rows of its embedding have norms {target.probe()}, those of the head's target {probe}"
        )


OWN = Layout("specdec", "specdec's own", _kind, _recognises, _read)
