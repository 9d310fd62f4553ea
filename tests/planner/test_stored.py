"""Directories: which files and which tensors of them count."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from specdec.planner import PlannedModel, read_model
from specdec.planner.stored import read_stored
from specdec.planner.weights import part_of
from tests.models.architectures import named

_DTYPES = {"F16": 2, "I32": 4, "F32": 4, "U8": 1}
LLAMA: dict[str, Any] = {**named("llama").options, "model_type": "llama"}
# A type without a formula, whose weights are counted by the files' names.
NEOX: dict[str, Any] = {**named("gpt_neox").options, "model_type": "gpt_neox"}


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]], dtype: str = "F16") -> None:
    """Write a header that promises tensors, and none of their bytes."""
    rows, at = {}, 0
    for name, shape in tensors.items():
        size = _DTYPES[dtype]
        for length in shape:
            size *= length
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(rows).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of transformers' tensors, tied ones once."""
    from specdec.models.sizes import named_parameters

    return {name: (count,) for name, count in named_parameters(config)}


def written(folder: Path, config: dict[str, Any], **files: dict[str, tuple[int, ...]]) -> PlannedModel:
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        write_safetensors(folder / f"{name.replace('__', '-')}.safetensors", tensors)
    return read_model(folder)


@pytest.mark.parametrize("name", ["model", "model__00001"])
def test_a_copy_in_another_layout_counts_once(tmp_path: Path, name: str) -> None:
    own = tensors_of(LLAMA)
    other = {f"layers.0.{tensor}": shape for tensor, shape in own.items()}
    model = written(tmp_path, LLAMA, **{name: own}, consolidated=other)
    assert not model.notes
    assert model.stored is not None
    assert model.stored.num_bytes == 2 * model.weights.total


def test_a_single_file_counts_before_an_index(tmp_path: Path) -> None:
    """As in transformers, which loads it."""
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 7}}')
    stored = written(tmp_path, LLAMA, model=tensors_of(LLAMA)).stored
    assert stored is not None
    assert len(stored.tensors) == len(tensors_of(LLAMA))


def test_a_copy_alone_counts(tmp_path: Path) -> None:
    found = written(tmp_path, LLAMA, consolidated={"tok_embeddings.weight": (64, 32), "output.weight": (64, 32)})
    assert found.stored is not None
    assert found.stored.num_bytes == 2 * 2 * 64 * 32


def test_the_index_says_which_files_and_tensors_count(tmp_path: Path) -> None:
    own = tensors_of(NEOX)
    names = list(own)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        write_safetensors(tmp_path / file, {name: own[name] for name in part} | {"left_over.weight": (1000,)})
    write_safetensors(tmp_path / "model-0-old.safetensors", own)
    places = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 7}, "weight_map": places}))
    model = written(tmp_path, NEOX)
    assert model.weights.source == "the files' headers"
    assert model.weights.total == sum(count for (count,) in own.values())
    (tmp_path / "model-2.safetensors").unlink()
    found = read_model(tmp_path)
    assert found.weights.total == model.weights.total
    assert found.notes == ("1 of the 2 weight files are not there (model-2.safetensors)",)


def test_what_is_no_decoder_does_not_count(tmp_path: Path) -> None:
    own = tensors_of(NEOX)
    others = {
        "vision_tower.blocks.0.weight": (5000,),
        "multi_modal_projector.linear_1.weight": (5000,),
        "mtp.layers.0.self_attn.q_proj.weight": (5000,),
        "gpt_neox.layers.2.attention.dense.weight": (5000,),  # beyond the two layers of the config
    }
    model = written(tmp_path, NEOX, model=own | others)
    assert model.weights.total == sum(count for (count,) in own.values())
    nested = {f"language_model.{name}": shape for name, shape in own.items()}
    assert written(tmp_path, NEOX, model={**nested, "resampler.weight": (5000,)}).weights == model.weights


def test_a_tied_output_matrix_in_the_files_does_not_count(tmp_path: Path) -> None:
    tied = NEOX | {"tie_word_embeddings": True}
    own = tensors_of(NEOX)
    assert any(part_of(name) == "head" for name in own)
    weights = written(tmp_path, tied, model=own).weights
    assert weights.head == 0
    assert weights.output_matrix(read_model(tied).shape) == 64 * 32


@pytest.mark.parametrize(("share", "warns"), [(0.5, True), (0.999, False), (2, True)])
def test_files_of_another_size_than_the_config_warn(tmp_path: Path, share: float, warns: bool) -> None:
    total = sum(count for (count,) in tensors_of(LLAMA).values())
    model = written(tmp_path, LLAMA, model={"model.layers.0.mlp.up_proj.weight": (round(share * total),)})
    assert model.weights.total == total
    assert any("the config describes" in note for note in model.notes) == warns


def test_nothing_there(tmp_path: Path) -> None:
    assert read_stored(tmp_path) is None
