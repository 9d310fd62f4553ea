"""Files that hold no head, a damaged one, one of another target, or one of a kind that is not supported."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import CheckpointError, ConfigError, IncompatibleDrafterError
from specdec.heads.layouts import LAYOUTS
from specdec.heads.loading import kind_of, load_head
from specdec.heads.saving import save_head
from tests.heads.faulty_heads import OTHER, Config, Weights, eagle3, medusa
from tests.heads.layout_files import LLAMA, TARGET, write


def test_own_layout_refuses_another_target_of_the_same_shape(tmp_path: Path) -> None:
    config, weights = eagle3()
    head = load_head(write(tmp_path / "a", config, weights), TARGET)
    folder = save_head(tmp_path / "b", head.module, head.vocabulary, TARGET)
    with pytest.raises(IncompatibleDrafterError, match=r"trained for a/target, and b is another model"):
        load_head(folder, replace(TARGET, name="b", embedding=OTHER))
    with pytest.raises(IncompatibleDrafterError, match="no block 2"):
        load_head(folder, replace(TARGET, num_layers=2))


def change_json(folder: Path, **inner: dict[str, Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    for name, values in inner.items():
        config[name] = config[name] | values if isinstance(values, dict) else values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": {"colour": 1}}, "unknown fields: colour; missing fields: none"),
        ({"head": {"num_heads": None}}, "unknown fields: none; missing fields: num_heads"),
        ({"format_version": 2}, "format_version=2; this specdec reads 1"),
        ({"kind": "hydra"}, "kind='hydra'; allowed in a head: eagle, medusa"),
        ({"target": {"probe": "x"}}, "probe='x'; allowed: a list of numbers"),
        ({"target": {"probe": [10**400]}}, "allowed: a list of numbers"),
        ({"head": {"rope_parameters": {"rope_theta": -1}}}, "rope_theta=-1; allowed: a finite number > 0"),
        ({"settings": {"max_draft_tokens": 0}}, "max_draft_tokens=0; allowed: an integer > 0"),
        *[
            ({"head": {name: value}}, f"{name}=.*allowed: ")
            for name, values in {
                "hidden_size": (-1, 1.5, True, "abc", []),
                "head_dim": (7, 0, 2**40, {}),
                "num_kv_heads": (0,),
                "num_layers": (2**20, "1", True),
                "norm_eps": (0, -1.0, "abc", math.nan, 10**400),
                "rope_parameters": (7, []),
                "max_positions": (0, 2**40),
                "feature_layers": (7, "abc", ["a"]),
                "fc_bias": (0, []),
            }.items()
            for value in values
        ],
        ({"head": {"draft_vocab_size": 23}}, r"draft_ids has shape \(24,\); expected \(23,\)"),
    ],
)
def test_own_layout_with_a_damaged_config(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config, weights = eagle3()
    head = load_head(write(tmp_path / "a", config, weights), TARGET)
    folder = save_head(tmp_path / "b", head.module, head.vocabulary, TARGET)
    with pytest.raises(CheckpointError, match=message):
        load_head(change_json(folder, **change), TARGET)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_without_plain_values(kind: str, tmp_path: Path) -> None:
    config, weights = eagle3()
    fc = weights["fc.weight"]
    folder = write(tmp_path, config, weights)
    (folder / "model.safetensors").unlink()
    torch.save(weights | {"fc.weight": fc.to_sparse() if kind == "sparse" else fc.to("meta")}, folder / "model.bin")
    with pytest.raises(CheckpointError, match=r"without values \(meta\): fc.weight"):
        load_head(folder, TARGET)


def test_a_config_that_is_nested_too_deeply(tmp_path: Path) -> None:
    folder = write(tmp_path, *eagle3())
    (folder / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match="no valid JSON"):
        load_head(folder, TARGET)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 5, 200, -100])
def test_a_truncated_file_is_named(tmp_path: Path, file: str, kept: int) -> None:
    config, weights = eagle3()
    path = write(tmp_path, config, weights, file) / file
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"{file} is (truncated|damaged).*download or save the head again"):
        kind_of(tmp_path)


def test_old_files_of_torch_are_read(tmp_path: Path) -> None:
    config, weights = eagle3()
    write(tmp_path, config, weights)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"state_dict": weights}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    load_head(tmp_path, TARGET)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, old: bool) -> None:
    config, weights = eagle3()
    write(tmp_path, config, weights)
    (tmp_path / "model.safetensors").unlink()
    held = weights | {"bomb": Bomb(tmp_path / "ran")}
    torch.save(held, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin is a pickle that holds more than tensors.*safetensors"
    ):
        load_head(tmp_path, TARGET)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol=2))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        load_head(tmp_path, TARGET)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([1, 2], "holds a list; a dict of tensors"),
        ({"step": 3, "w": torch.ones(1)}, "values that are no tensors: step"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, held: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, TARGET)


def test_folders_that_hold_no_head(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json cannot be read.*a head is a folder of"):
        kind_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no valid JSON"):
        kind_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "head.gguf").touch()
    with pytest.raises(
        CheckpointError, match=r"holds no weights of a head.*\.safetensors.*found: config.json, head.gguf"
    ):
        kind_of(tmp_path)
    for name in ("a.bin", "b.bin"):
        torch.save({}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"2 weight files and no index.*a.bin, b.bin"):
        kind_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"head.gguf is a file; give the folder"):
        kind_of(tmp_path / "head.gguf")
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere; give"):
        kind_of(tmp_path / "nowhere")


def test_one_tensor_in_two_places(tmp_path: Path) -> None:
    config, weights = eagle3()
    with pytest.raises(CheckpointError, match=r"fc.weight and model.fc.weight|model.fc.weight and fc.weight"):
        load_head(write(tmp_path, config, weights | {"model.fc.weight": weights["fc.weight"]}), TARGET)


W = torch.ones(2, 2)
UNSUPPORTED: dict[str, tuple[Config, Weights]] = {
    "DFlash": ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, {"layers.0.self_attn.q_proj.weight": W}),
    "DFlash or DSpark": ({"speculators_model_type": "dspark"}, {"layers.0.self_attn.q_proj.weight": W}),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, {"layers.0.hidden_norm.weight": W, "fc.weight": W}),
    "MTP": ({"num_nextn_predict_layers": 1}, {"model.layers.61.eh_proj.weight": W}),
    r"multi-token prediction \(MTP\)": ({"speculators_model_type": "mtp"}, {"layers.0.input_proj.weight": W}),
    "Hydra": ({"hydra_num_heads": 4}, {"hydra_mlp.0.0.linear.weight": W}),
    "MLP speculator": ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, {"speculator.emb.0.weight": W}),
    "ReDrafter": ({}, {"rnn_u.weight": W, "lm_head.0.linear.weight": W}),
    "HASS": (LLAMA, {"fc.weight": W, "layers.0.mlp.up_proj.weight": W, "embedding_layernorm.weight": W}),
    "latent attention": (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        {"midlayer.self_attn.kv_a_proj_with_mqa.weight": W},
    ),
    "layout of speculators": ({"speculators_model_type": "eagle"}, {"fc.weight": W}),
    "further layers": (LLAMA, {"midlayer.mlp.up_proj.weight": W, "additional_layers.0.mlp.up_proj.weight": W}),
    "PEFT adapter": ({}, {"base_model.model.layers.0.lora_A.weight": W}),
    "whole language model.*drafter='draft_model'": (
        LLAMA,
        {"model.layers.0.mlp.up_proj.weight": W, "lm_head.weight": W},
    ),
    "no layout of a head that is known: a, b;": ({}, {"a": W, "b": W}),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_kinds_that_are_not_supported_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=name) as caught:
        kind_of(write(tmp_path, *UNSUPPORTED[name]))
    assert all(layout.name in str(caught.value) for layout in LAYOUTS)


def test_an_option_beside_a_path_that_names_another_head(tmp_path: Path) -> None:
    from specdec.build import named_drafter

    folder = str(write(tmp_path, *medusa()))
    assert named_drafter(folder, {"tree": "3"}) == ("medusa", {"tree": "3", "model": folder})
    with pytest.raises(ConfigError, match="names a head and drafter_options"):
        named_drafter(folder, {"model": "other"})
    with pytest.raises(ConfigError, match="unknown drafter 'medusas'; did you mean 'medusa'"):
        named_drafter("medusas", {})


def test_the_page_of_layouts_lists_them_all() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
    if not page.is_file():
        pytest.skip("not a checkout")
    table = page.read_text(encoding="utf-8").split("<!-- layouts -->")[1].strip().split("\n\n")[0]
    assert [row.split("|")[1].strip().strip("`") for row in table.splitlines()[2:]] == [x.name for x in LAYOUTS]
