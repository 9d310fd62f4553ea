"""Quantised checkpoints are planned in the bytes they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.planner import Plan, Workload, find_device, make_plan, read_model
from tests.models.architectures import named
from tests.planner import configs, hub
from tests.planner.test_stored import tensors_of, write_safetensors


def plan(config: dict[str, Any] | Path, device: str = "h100", **load: Any) -> Plan:
    return make_plan(read_model(config), find_device(device), Workload(**load))


# What the files on the hub have, in GB.
PUBLISHED: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("gptq", configs.LLAMA2_70B, {"quant_method": "gptq", "bits": 4, "group_size": 128}, 36.65),
    ("gptq rows", configs.LLAMA2_70B, {"quant_method": "gptq", "bits": 4, "group_size": -1}, 35.33),
    ("awq", configs.LLAMA2_70B, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 36.61),
    ("mxfp4", hub.GPT_OSS_20B, hub.GPT_OSS_20B["quantization_config"], 13.76),
    ("fp8", configs.LLAMA2_70B, {"quant_method": "fp8"}, 69.5),
]


@pytest.mark.parametrize(
    ("config", "quantised", "gigabytes"), [p[1:] for p in PUBLISHED], ids=[p[0] for p in PUBLISHED]
)
def test_published_sizes(config: dict[str, Any], quantised: dict[str, Any], gigabytes: float) -> None:
    found = plan(config | {"quantization_config": quantised}, dtype="bf16")
    assert found.memory["weight_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert found.memory["fits"]  # 70B in 16 bits does not
    assert any(
        f"quantised ({quantised['quant_method']})" in warning and "bits" in warning for warning in found.warnings
    )


def test_deepseek_v3_as_released() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    found = plan(configs.DEEPSEEK_V3 | {"quantization_config": fp8}, "h200")
    assert found.memory["weight_bytes"] / 1e9 == pytest.approx(671 + 2 * 0.93, rel=0.002)


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4 + 0.125 + 32 / 16384),
        ({"load_in_8bit": True}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
            },
            4.125,
        ),
        ({"quant_method": "quanto", "weights": "int8"}, 8),
    ],
)
def test_a_step_reads_so_many_bits(quantised: dict[str, Any], bits: float) -> None:
    plain = plan(configs.LLAMA2_7B, context=1).decode
    packed = plan(configs.LLAMA2_7B | {"quantization_config": quantised}, context=1).decode
    dense = read_model(configs.LLAMA2_7B).weights.dense
    assert plain.num_bytes - packed.num_bytes == pytest.approx(dense * (2 - bits / 8), rel=1e-6)
    assert packed.flops == plain.flops


def test_experts_alone() -> None:
    model = read_model(hub.GPT_OSS_20B)
    assert model.weights.packed.bits() == {"experts": 4.25}
    skipping = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]}
    assert read_model(hub.GPT_OSS_20B | {"quantization_config": skipping}).weights.packed.bits() == {"experts": 8}


def test_an_unknown_method_is_planned_in_the_dtype_and_says_so() -> None:
    found = plan(configs.LLAMA2_7B | {"quantization_config": {"quant_method": "new_method"}})
    assert found.memory["weight_bytes"] == 2 * found.model.weights.total
    assert any("how many bits its weights have is not known" in warning for warning in found.warnings)


def test_files_say_it_best(tmp_path: Path) -> None:
    """Whatever the method: bytes of the files over weights of the config."""
    config = {**named("llama").options, "model_type": "llama", "quantization_config": {"quant_method": "new_method"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = tensors_of({key: value for key, value in config.items() if key != "quantization_config"})
    layers = {name: shape for name, shape in tensors.items() if ".layers." in name}
    write_safetensors(tmp_path / "model-1.safetensors", {name: s for name, s in tensors.items() if name not in layers})
    packed = {f"{name}_packed": (count // 2,) for name, (count,) in layers.items()}
    write_safetensors(tmp_path / "model-2.safetensors", packed, "U8")
    found = plan(tmp_path, dtype="bf16", context=1)
    stored = found.model.stored
    assert stored is not None
    assert found.memory["weight_bytes"] == pytest.approx(stored.num_bytes)
    assert found.model.weights.total == sum(count for (count,) in tensors.values())
    assert set(found.to_dict()["model"]["quantised_bits"]) == {"dense"}


def test_a_quantised_draft_model_and_copies_of_a_quantised_target() -> None:
    small = configs.LLAMA32_1B | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    model = read_model(configs.LLAMA31_8B | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    h100 = find_device("h100")
    found = make_plan(model, h100, Workload(drafter="draft_model", drafter_options={"model": small}))
    assert found.memory["drafter_weight_bytes"] == read_model(small).weights.num_bytes(2)
    copy = make_plan(model, h100, Workload(drafter="self_int8"))
    assert copy.memory["drafter_weight_bytes"] == model.weights.dense + model.weights.head
    # The int8 copy is wider than what it copies: a step of it must not be the cheaper one.
    assert copy.speculation.at(1, 1).draft_s > copy.speculation.at(1, 0).verify_s


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ("x", "quantization_config is 'x'"),
        ({"quant_method": 5}, "quantization_config.quant_method is 5"),
        (
            {"quant_method": "gptq", "bits": "four"},
            "quantization_config.bits is 'four' in its config; allowed: a whole",
        ),
        ({"quant_method": "gptq", "bits": 0}, "quantization_config.bits is 0"),
        ({"quant_method": "gptq", "group_size": -7}, "quantization_config.group_size is -7"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({"quant_method": "quanto", "weights": "int"}, "weights is 0"),
    ],
)
def test_values_that_make_no_sense(quantised: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model(configs.LLAMA2_7B | {"quantization_config": quantised})
    assert message in str(caught.value)
