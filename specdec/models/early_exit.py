"""The first layers of a model with its own final norm and head, as a program over the same KV cache."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from specdec.errors import ConfigError, IncompatibleDrafterError, UnsupportedModelError
from specdec.interfaces import Segment
from specdec.models.clone import clone_sharing_parameters
from specdec.models.hosted import HostedProgram
from specdec.models.hosted_mask import MaskedProgram
from specdec.models.hosting import same_kind
from specdec.models.lean import LeanProgram
from specdec.models.runner import ModelRunner, Program
from specdec.models.taps import find_blocks

# What code of a model raises when layers are missing that it counts on.
_MODEL_ERRORS = (RuntimeError, TypeError, AttributeError, IndexError, KeyError, AssertionError, UnsupportedModelError)

_PROGRAMS: weakref.WeakKeyDictionary[Any, dict[int, Program]] = weakref.WeakKeyDictionary()  # by target program


def first_layers(runner: ModelRunner, num_layers: int) -> ModelRunner:
    """Return a runner of a target's first `num_layers` layers that shares its weights and its KV cache.

    Raises:
        ConfigError: the target has no such number of layers.
        IncompatibleDrafterError: its layers cannot be cut.
    """
    most = runner.program.num_layers
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or not 1 <= num_layers <= most:
        raise ConfigError(f"num_layers={num_layers!r}; allowed: an integer from 1 to the target's {most} layers")
    if num_layers == most:
        return runner.sharing_cache(runner.program)
    name = type(runner.model).__name__
    known = _PROGRAMS.setdefault(runner.program, {})
    if num_layers in known:
        return runner.sharing_cache(known[num_layers])
    try:
        shortened = runner.sharing_cache(_cut(runner.program, num_layers))
        _probe(shortened, num_layers)
    except _MODEL_ERRORS as error:
        raise IncompatibleDrafterError(
            f"drafter 'early_exit' cannot run {name} without its last {most - num_layers} layers ({error}); use "
            "drafter='ngram' or 'suffix'"
        ) from error
    known[num_layers] = shortened.program
    return shortened


def _cut(program: Program, num_layers: int) -> Program:
    if isinstance(program, LeanProgram):
        return program.first_layers(num_layers)
    if isinstance(program, HostedProgram | MaskedProgram):
        return same_kind(program, cut_model(program.model, num_layers))
    raise UnsupportedModelError(f"{type(program).__name__} is not known to consist of layers")


def cut_model(model: Any, num_layers: int) -> Any:
    """Return a copy of a model with its first `num_layers` decoder blocks, which are the model's own modules.

    Raises:
        UnsupportedModelError: it has no list of decoder blocks.
    """
    blocks = find_blocks(model, model.config.get_text_config().num_hidden_layers)
    first = nn.ModuleList(blocks[:num_layers])
    # Modules are taken as they are where they can: they may hold reordered weights, which a copy would double.
    kept = [(m, m) for m in model.modules() if m is not model and next(m.children(), None) is None]
    shortened: Any = clone_sharing_parameters(model, [*kept, (blocks, first)])
    config = shortened.config.get_text_config()
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types[:num_layers])
    return shortened


def _probe(runner: ModelRunner, num_layers: int) -> None:
    """Run two tokens over an empty cache; raise UnsupportedModelError if other layers than the first ones were."""
    alone = runner.with_own_cache()
    alone.cache.open(0, 2)
    alone.cache.reserve(0, 2)
    logits = alone.forward([Segment(0, torch.zeros(2, dtype=torch.int64), None, torch.arange(2))]).logits
    if alone.cache.layers != list(range(num_layers)):
        raise UnsupportedModelError(f"its first {num_layers} layers write the KV of layers {alone.cache.layers}")
    if logits.shape != (2, runner.vocab_size):
        raise UnsupportedModelError(f"its logits have the shape {tuple(logits.shape)}")
