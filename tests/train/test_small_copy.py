"""A draft model made of some of its target's blocks, saved without what is the target's."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import CheckpointError, ConfigError, IncompatibleDrafterError
from specdec.heads.small_model import advised_settings, load_small_model, save_small_model
from specdec.models.small_copy import own_tensors, small_copy
from tests.decoding import one
from tests.train.toy import VOCAB_SIZE, toy_model, toy_target, vocabulary_of

LAYERS = (0, 3, 5)
SOME = [1, 4, 9, 30]
BOTH = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def saved(
    folder: Path, tied: bool = False, drafted: list[int] | None = None, dtype: torch.dtype = torch.int8
) -> tuple[Any, Any]:
    """Save a copy whose own weights were changed; return it and the target's model."""
    model = toy_model(tied=tied)
    small = small_copy(model, LAYERS)
    torch.manual_seed(2)
    for tensor in own_tensors(small).values():
        tensor += 0.05 * torch.randn_like(tensor)
    vocabulary = vocabulary_of(drafted)
    save_small_model(folder, small, LAYERS, vocabulary, toy_target(model), settings={"tree": "chain"}, dtype=dtype)
    return small, model


@BOTH
def test_a_copy_of_all_blocks_is_the_model(tied: bool) -> None:
    model = toy_model(tied=tied)
    small = small_copy(model, range(6))
    ids = one(range(1, 20))
    torch.testing.assert_close(small(input_ids=ids).logits, model(input_ids=ids).logits)
    own = own_tensors(small)
    assert not {p.data_ptr() for p in own.values()} & {p.data_ptr() for p in model.parameters()}
    assert not any("embed_tokens" in name or "lm_head" in name for name in own)
    assert len(own) == 6 * 9 + 1


@BOTH
@pytest.mark.parametrize("drafted", [None, SOME], ids=["whole", "some"])
def test_what_is_loaded_is_what_was_saved_and_the_target_is_untouched(
    tied: bool, drafted: list[int] | None, tmp_path: Path
) -> None:
    before = {k: v.clone() for k, v in toy_model(tied=tied).state_dict().items()}
    small, model = saved(tmp_path / "drafter", tied, drafted, torch.float16)
    loaded, vocabulary = load_small_model(tmp_path / "drafter", model, toy_target(model))
    assert vocabulary.target_ids.tolist() == (drafted or list(range(VOCAB_SIZE)))
    theirs = dict(loaded.named_parameters())
    for name, tensor in own_tensors(small).items():
        assert torch.equal(theirs[name], tensor.to(torch.float16).to(torch.float32)), name
    half = small_copy(model, LAYERS)
    for name, tensor in own_tensors(half).items():
        tensor.copy_(theirs[name])
    ids = one(range(1, 20))
    expected = half(input_ids=ids).logits[..., vocabulary.target_ids]
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
    assert loaded.get_input_embeddings() is model.get_input_embeddings()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(p.requires_grad for p in (*model.parameters(), *loaded.parameters()))
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert all(t.dtype == torch.float16 for name, t in stored.items() if name != "draft_ids")
    assert sum(t.numel() for t in stored.values()) == sum(t.numel() for t in own_tensors(small).values()) + len(
        drafted or []
    )


def test_matrices_in_int8_are_right_to_half_a_step_of_their_row(tmp_path: Path) -> None:
    small, model = saved(tmp_path / "drafter")
    theirs = dict(load_small_model(tmp_path / "drafter", model, toy_target(model))[0].named_parameters())
    for name, tensor in own_tensors(small).items():
        step = tensor.abs().amax(dim=-1, keepdim=True) / 127 if tensor.dim() == 2 else 2e-3 * tensor.abs().amax()
        assert bool(((theirs[name] - tensor).abs() <= 0.51 * step).all()), name
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {t.dtype for t in stored.values() if t.dim() == 2} == {torch.int8}
    scale = next(name for name in stored if name.endswith("_scale"))
    save_file({name: t for name, t in stored.items() if name != scale}, tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{scale} is missing"):
        load_small_model(tmp_path / "drafter", model, toy_target(model))


def test_another_target_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    other = toy_model(tied=True)
    target = toy_target(other)
    load_small_model(tmp_path, other, target)  # the same embedding
    with torch.no_grad():
        table = other.get_input_embeddings().weight.clone()
    target = replace(target, embedding=lambda ids: 2 * table[ids])
    with pytest.raises(IncompatibleDrafterError, match=r"was distilled for .* is another one"):
        load_small_model(tmp_path, other, target)


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    _, model = saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    missing, bent = sorted(tensors)[0], sorted(tensors)[-1]
    tensors.pop(missing)
    tensors[bent] = tensors[bent][:-1].clone()
    tensors["more"] = torch.ones(1)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load_small_model(tmp_path, model, toy_target(model))
    text = str(caught.value)
    assert f"missing {missing}" in text and "unexpected more" in text and f"{bent} has the shape" in text


def test_damaged_files_are_named(tmp_path: Path) -> None:
    _, model = saved(tmp_path)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_small_model(tmp_path, model, toy_target(model))
    about = json.loads(config.read_text())
    del about["head"]["layers"]
    config.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="does not describe a distilled draft model"):
        load_small_model(tmp_path, model, toy_target(model))


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("head", "layers"), [6], r"layers=\[6\]; allowed: at least one of 0 to 5"),
        (("head", "layers"), "0", "allowed: a list of integers"),
        (("target", "probe"), ["a"], "allowed: a list of numbers"),
        (("target", "vocab_size"), -1, "allowed: an integer > 0"),
        (("settings",), 7, "allowed: an object"),
        (("settings", "max_draft_tokens"), "many", "allowed: an integer > 0"),
        (("format_version",), 2, "does not describe a distilled draft model: .*format_version 2"),
    ],
)
def test_a_damaged_description_is_named(where: tuple[str, ...], value: Any, message: str, tmp_path: Path) -> None:
    _, model = saved(tmp_path)
    config = tmp_path / "config.json"
    about = json.loads(config.read_text())
    inner = about
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    config.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=message):
        assert (advised_settings(tmp_path), load_small_model(tmp_path, model, toy_target(model))) is None


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("draft_ids", torch.tensor([0.5]), "draft_ids is float32"),
        ("draft_ids", torch.tensor([[1]]), r"draft_ids is int64 of shape \(1, 1\)"),
        ("model.norm.weight", torch.ones(32, dtype=torch.int32), "model.norm.weight is stored as int32"),
        ("model.norm.weight", torch.full((32,), math.inf), "model.norm.weight has NaN or infinite values"),
    ],
)
def test_tensors_of_the_wrong_kind_are_named(name: str, tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    _, model = saved(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path)
    with pytest.raises(CheckpointError, match=message):
        load_small_model(tmp_path, model, toy_target(model))


@pytest.mark.parametrize("layers", [[], [6], [-1], [True], ["0"]], ids=str)
def test_blocks_that_are_not_there_are_refused(layers: list[Any]) -> None:
    with pytest.raises(ConfigError, match="allowed: at least one of 0 to 5"):
        small_copy(toy_model(), layers)
