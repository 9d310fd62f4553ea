"""The three kinds of drafters that can be trained: what each begins as, learns by, and is saved as."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import ConfigError
from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.loading import load_head
from specdec.heads.saving import save_head
from specdec.heads.small_model import load_small_model, save_small_model
from specdec.heads.target import HeadTarget
from specdec.models.small_copy import own_tensors, small_copy
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
    init: str | None = None  # a trained drafter of the same kind to go on from, on other data or at another rate

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


def begun_vocabulary(method: str, init: str, model: Any, target: HeadTarget) -> DraftVocabulary:
    """Return the draft vocabulary of a trained drafter that is to go on.

    Raises:
        CheckpointError: it cannot be read.
        IncompatibleDrafterError: it is another target's.
    """
    return load_small_model(init, model, target)[1] if method == "draft_model" else load_head(init, target).vocabulary


def _go_on_from(module: nn.Module, given: Ingredients) -> None:
    """Take the weights of the trained head `given.init`."""
    assert given.init is not None, "there is a head to go on from"
    begun = load_head(given.init, given.target)
    _same_vocabulary(begun.vocabulary, given)
    ours, theirs = module.state_dict(), begun.module.state_dict()
    if ours.keys() != theirs.keys() or any(ours[k].shape != theirs[k].shape for k in ours):
        raise ConfigError(f"init={given.init!r} is a head of another shape than the one to be trained")
    module.load_state_dict(theirs)


def _fill_from(small: Any, begun: Any, given: Ingredients) -> None:
    """Take the weights of the draft model `given.init`; the embedding and the head are the target's own."""
    own = own_tensors(small)
    theirs = {name: p for name, p in begun.named_parameters() if name in own}
    same_depth = begun.config.get_text_config().num_hidden_layers == small.config.get_text_config().num_hidden_layers
    if theirs.keys() != own.keys() or not same_depth:
        raise ConfigError(
            f"init={given.init!r} has other blocks than layers={given.options.get('layers')}; name those it began as"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(theirs[name])


def _same_vocabulary(vocabulary: DraftVocabulary, given: Ingredients) -> None:
    if not torch.equal(vocabulary.target_ids.cpu(), given.vocabulary.target_ids.cpu()):
        raise ConfigError(f"init={given.init!r} drafts other tokens; train with its draft vocabulary")


# Which options each method has, and of which type; counts are at least 1.
OPTIONS: dict[str, dict[str, type]] = {
    "eagle3": {
        "steps": int, "step_decay": float, "first_steps": int, "first_share": float,
        "intermediate_size": int, "num_layers": int,
    },
    "medusa": {"num_heads": int, "num_layers": int, "head_decay": float},
    "draft_model": {"layers": list, "num_draft_tokens": int},
}  # fmt: skip
METHODS = tuple(OPTIONS)
_ALLOWED = {int: "an integer >= 1", float: "a number >= 0", list: "a list of the target's blocks, such as [0, 1, 29]"}


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """Refuse what no job of this method can be built with; what depends on the target shows later.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range.
    """
    known = OPTIONS[method]
    refuse_unknown(f"specdec train {method}: options", options, known)
    for name, value in options.items():
        kind = known[name]
        fits = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
        if not fits or (kind is not list and value < (1 if kind is int else 0)):
            raise ConfigError(f"options.{name}={value!r}; allowed: {_ALLOWED[kind]}")
    if method == "eagle3":
        EagleTraining(**{k: v for k, v in options.items() if k in EagleTraining.__slots__})


def steps_join_at(method: str, options: Mapping[str, Any], num_tokens: int) -> dict[int, str]:
    """Return at how many tokens the loss comes to be of more draft tokens and so jumps, and what to write there."""
    if method != "eagle3":
        return {}
    training = EagleTraining(**{k: v for k, v in options.items() if k in EagleTraining.__slots__})
    if not 0 < training.first_share < 1 or training.first_steps == training.steps:
        return {}
    return {round(training.first_share * num_tokens): f"{training.first_steps} -> {training.steps} draft tokens"}


def _eagle3(given: Ingredients) -> Job:
    options = given.options
    refuse_unknown("eagle3", options, OPTIONS["eagle3"])
    shape = {k: options[k] for k in ("intermediate_size", "num_layers") if k in options}
    training = EagleTraining(**{k: v for k, v in options.items() if k not in shape})
    rms = feature_rms(given.examples)
    head = new_eagle3(given.target, given.vocabulary, norm=rms[-given.target.hidden_size :], **shape)
    if given.init is not None:
        _go_on_from(head, given)
        head.fc.weight.data.mul_(rms[: head.config.num_features])  # its scale was folded in when it was saved
    weight = given.weight
    head.lm_head.weight = weight
    step = EagleStep(head, given.vocabulary, weight, training)
    step.feature_scale.copy_(rms[: head.config.num_features].reciprocal())

    def save(folder: Path, settings: dict[str, Any], card: str | None) -> Path:
        return save_head(folder, step.trained_head(), given.vocabulary, given.target, settings=settings, card=card)

    return Job(step, save)


def _medusa(given: Ingredients) -> Job:
    options = given.options
    refuse_unknown("medusa", options, OPTIONS["medusa"])
    shape = {k: options[k] for k in ("num_heads", "num_layers") if k in options}
    heads = new_medusa(given.target, given.vocabulary, **shape)
    if given.init is not None:
        _go_on_from(heads, given)
    weight = given.weight
    heads.lm_head.weight = weight
    step = MedusaStep(heads, given.vocabulary, weight, options.get("head_decay", 0.8))

    def save(folder: Path, settings: dict[str, Any], card: str | None) -> Path:
        return save_head(folder, heads, given.vocabulary, given.target, settings=settings, card=card)

    return Job(step, save)


def _draft_model(given: Ingredients) -> Job:
    options = given.options
    refuse_unknown("draft_model", options, OPTIONS["draft_model"])
    layers = options.get("layers")
    if layers is None:
        layers = [0, given.target.num_layers - 1]
    if not isinstance(layers, Sequence):
        raise ConfigError(f"layers={layers!r}; allowed: a list of the target's blocks, such as [0, 1, 29]")
    small = small_copy(given.model, list(layers))
    if given.init is not None:
        begun, vocabulary = load_small_model(given.init, given.model, given.target)
        _same_vocabulary(vocabulary, given)
        _fill_from(small, begun, given)
    step = DraftModelStep(small, given.vocabulary, given.weight, options.get("num_draft_tokens", 4))

    def save(folder: Path, settings: dict[str, Any], card: str | None) -> Path:
        return save_small_model(
            folder, small, tuple(layers), given.vocabulary, given.target, settings=settings, card=card
        )

    return Job(step, save)
