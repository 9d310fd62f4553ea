"""The engine's copy of a model: shares every weight, and notices what the caller changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from specdec.models.clone import clone_sharing_parameters, fingerprint
from tests.decoding import prompts, reference
from tests.models.architectures import build, model_of, named


def test_it_shares_storage_and_no_parameter_object() -> None:
    """A forward that rebinds a parameter's data, as some quantised and parametrised layers do, rebinds its own."""
    model = build(named("llama"))
    clone = clone_sharing_parameters(model)
    for theirs, ours in zip(model.parameters(), clone.parameters(), strict=True):
        assert ours is not theirs and ours.data_ptr() == theirs.data_ptr()
    kept = model.lm_head.weight.data_ptr()
    clone.lm_head.weight.data = clone.lm_head.weight.data.clone()
    assert model.lm_head.weight.data_ptr() == kept


def test_tied_weights_stay_tied() -> None:
    clone: Any = clone_sharing_parameters(build(named("llama"), tie_word_embeddings=True))
    assert clone.lm_head.weight is clone.model.embed_tokens.weight


def test_tensors_that_are_no_parameters_are_shared_too() -> None:
    model = build(named("llama"))
    model.extra = {"table": [torch.randn(3)], "flag": True}
    clone: Any = clone_sharing_parameters(model)
    assert clone.extra["table"][0] is model.extra["table"][0]
    assert clone.extra is not model.extra


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "gpt2", "deepseek_v3"])
def test_what_the_callers_own_calls_leave_is_no_change(name: str) -> None:
    model = model_of(named(name))
    before = fingerprint(model)
    reference(model, prompts(3)[0], 2)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.mul_(1.001),
        lambda w: w.data.add_(0.5),
        lambda w: w.data.zero_(),
        lambda w: w.data.copy_(torch.flip(w.data, [0])),
        lambda w: w.data[: len(w) // 2].neg_(),
        lambda w: setattr(w, "data", w.data.clone()),
    ],
    ids=["scale", "add", "zero", "flip", "half", "replace"],
)
def test_writes_through_data_are_noticed(write: Callable[[Any], Any]) -> None:
    model = build(named("llama"))
    before = fingerprint(model)
    with torch.no_grad():
        write(model.lm_head.weight)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.model.rotary_emb.inv_freq.mul_(2.0),
        lambda m: m.model.layers.append(m.model.layers[0]),
        lambda m: m.model.layers.pop(1),
        lambda m: m.model.register_forward_hook(lambda *args: None),
        lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.1),
        lambda m: setattr(m.model.layers[0], "switch", {"on": [True]}),
        lambda m: setattr(m, "lm_head", nn.Linear(32, 64, dtype=torch.float64)),
    ],
    ids=["buffer", "append", "pop", "hook", "number", "containers", "module"],
)
def test_other_changes_are_noticed(change: Callable[[Any], Any]) -> None:
    model = build(named("llama"))
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_nan_is_no_change() -> None:
    model = build(named("llama"))
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert fingerprint(model) == fingerprint(model)


def test_evaluation_mode_is_the_clones_own() -> None:
    model = build(named("llama")).train()
    assert not clone_sharing_parameters(model).training
    assert model.training
