"""The three kinds of drafters that can be trained: what each begins as, learns by, and is saved as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.saving import save_head
from specdec.heads.small_model import save_small_model
from specdec.heads.target import HeadTarget
from specdec.models.small_copy import small_copy
from specdec.registry import refuse_unknown
from specdec.train.draft_model_step import DraftModelStep
from specdec.train.eagle_step import EagleStep, EagleTraining
from specdec.train.medusa_step import MedusaStep
from specdec.train.new_heads import feature_rms, new_eagle3, new_medusa
from specdec.train.store import Example


@dataclass(frozen=True, slots=True)
class Job:
    """A drafter in training."""

    step: Any  # the module that the loop trains
    # (folder, settings, card) -> folder; writes what was trained so that a drafter can be built from it
    save: Callable[[Path, dict[str, Any], str | None], Path]


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What jobs are made of."""

    model: Any  # the target's transformers model
    target: HeadTarget
    vocabulary: DraftVocabulary
    examples: Sequence[Example]
    dtype: torch.dtype  # of the large frozen products
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def weight(self) -> Tensor:
        """[Vd, H]: rows of the target's lm_head."""
        return self.target.output_rows(self.vocabulary.target_ids).to(self.dtype)


def build_job(method: str, given: Ingredients) -> Job:
    """Return the job of a method.

    Raises:
        ConfigError: the method or one of its options is unknown.
    """
    makers = {"eagle3": _eagle3, "medusa": _medusa, "draft_model": _draft_model}
    if method not in makers:
        refuse_unknown("specdec train", [method], makers)
    torch.manual_seed(given.options.pop("seed", 0))
    return makers[method](given)


METHODS = ("eagle3", "medusa", "draft_model")


def _eagle3(given: Ingredients) -> Job:
    options = given.options
    refuse_unknown("eagle3", options, {*EagleTraining.__slots__, "intermediate_size", "num_layers"})
    shape = {k: options[k] for k in ("intermediate_size", "num_layers") if k in options}
    training = EagleTraining(**{k: v for k, v in options.items() if k not in shape})
    rms = feature_rms(given.examples)
    head = new_eagle3(given.target, given.vocabulary, norm=rms[-given.target.hidden_size :], **shape)
    weight = given.weight
    head.lm_head.weight = weight
    step = EagleStep(head, given.vocabulary, weight, training)
    step.feature_scale.copy_(rms[: head.config.num_features].reciprocal())

    def save(folder: Path, settings: dict[str, Any], card: str | None) -> Path:
        return save_head(folder, step.trained_head(), given.vocabulary, given.target, settings=settings, card=card)

    return Job(step, save)


def _medusa(given: Ingredients) -> Job:
    options = given.options
    refuse_unknown("medusa", options, {"num_heads", "num_layers", "head_decay"})
    shape = {k: options[k] for k in ("num_heads", "num_layers") if k in options}
    heads = new_medusa(given.target, given.vocabulary, **shape)
    weight = given.weight
    heads.lm_head.weight = weight
    step = MedusaStep(heads, given.vocabulary, weight, options.get("head_decay", 0.8))

    def save(folder: Path, settings: dict[str, Any], card: str | None) -> Path:
        return save_head(folder, heads, given.vocabulary, given.target, settings=settings, card=card)

    return Job(step, save)


def _draft_model(given: Ingredients) -> Job:
    options = given.options
    refuse_unknown("draft_model", options, {"layers", "num_draft_tokens"})
    layers = options.get("layers")
    if layers is None:
        layers = [0, given.target.num_layers - 1]
    if not isinstance(layers, Sequence):
        raise ConfigError(f"layers={layers!r}; allowed: a list of the target's blocks, such as [0, 1, 29]")
    small = small_copy(given.model, list(layers))
    step = DraftModelStep(small, given.vocabulary, given.weight, options.get("num_draft_tokens", 4))

    def save(folder: Path, settings: dict[str, Any], card: str | None) -> Path:
        return save_small_model(
            folder, small, tuple(layers), given.vocabulary, given.target, settings=settings, card=card
        )

    return Job(step, save)
