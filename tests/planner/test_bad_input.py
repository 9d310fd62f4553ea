"""What is refused or warned of, and what the message says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError, ModelLoadError, SpecdecError, UnsupportedModelError
from specdec.planner import DEVICES, Device, Workload, custom_device, find_device, make_plan, read_model
from specdec.planner.device import ALIASES
from tests.planner import configs

H100 = find_device("h100")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "its config has no hidden_size (nor n_embd"),
        (
            {"num_hidden_layers": "32"},
            "num_hidden_layers is '32' in its config; allowed: a whole number from 1 to 10,000",
        ),
        ({"num_attention_heads": 30, "num_key_value_heads": 30}, "no multiple of 30 heads"),
        ({"num_key_value_heads": 5}, "cannot share 5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 32 layers"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "5 experts are chosen per token, but there are only 4"),
        ({"layer_types": ["linear_attention"] * 32}, "layers of type linear_attention"),
        ({"model_type": "mamba"}, "recurrent state"),
        ({"num_kv_shared_layers": 10}, "shares keys and values between layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "no_such_type"}, "weights of model type 'no_such_type' cannot be counted"),
    ],
)
def test_configs(changes: dict[str, Any], message: str) -> None:
    fields = {name: value for name, value in {**configs.LLAMA2_7B, **changes}.items() if value is not None}
    with pytest.raises(SpecdecError) as caught:
        read_model(fields, "my model")
    assert message in str(caught.value)
    assert str(caught.value).startswith("my model")
    assert isinstance(caught.value, ConfigError | UnsupportedModelError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0; allowed: a whole number from 1 to 1,000,000,000"),
        ({"batch": 10**400}, "allowed: a whole number from 1 to 1,000,000,000"),
        ({"context": 10**20}, "context=100000000000000000000; allowed: a whole number from 1 to 1,000,000,000"),
        ({"cost_ratio": float("nan")}, "cost_ratio=nan; allowed: a number from 0"),
        ({"cost_ratio": float("inf")}, "cost_ratio=inf"),
        ({"context": -1}, "context=-1"),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens=0"),
        ({"acceptance": 1.1}, "acceptance=1.1; allowed: 0 to 1"),
        ({"acceptance": float("nan")}, "acceptance=nan"),
        ({"memory_fraction": 0}, "memory_fraction=0"),
        ({"prompt_tokens": 5000}, "more than context=4096"),
        ({"dtype": "int8"}, "weights in fewer bits are not planned for"),
        ({"kv_dtype": "int5"}, "did you mean"),
        ({"kv_layout": "paged"}, "available: full, compact"),
    ],
)
def test_workloads(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Workload(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "eagle33"}, "did you mean 'eagle3'?"),
        ({"drafter": "my.module:Mine"}, "give its measured --cost-ratio"),
        ({"drafter": "draft_model"}, "the draft model is missing"),
        ({"drafter": "early_exit", "drafter_options": {"num_layers": 33}}, "allowed: 1 to 32"),
        ({"drafter": "ngram", "drafter_options": {"longest": 3}}, "no option 'longest'"),
        ({"drafter": "ngram", "cost_ratio": -1.0}, "cost_ratio=-1.0"),
    ],
)
def test_drafters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(read_model(configs.LLAMA2_7B), H100, Workload(**options))
    assert message in str(caught.value)


def test_devices() -> None:
    with pytest.raises(ConfigError, match="unknown device 'h10'; did you mean 'h100'"):
        find_device("h10")
    assert find_device(" RTX 4090 ") is DEVICES["rtx4090"]
    assert find_device("A100_40GB") is DEVICES["a100-40gb"]
    for name in (*DEVICES, *ALIASES):
        device = find_device(name)
        assert device.source
        assert device.flops_per_s["fp16"] >= device.flops_per_s["fp32"]
    with pytest.raises(ConfigError, match=r"T4 has no dense rate in bf16; available: fp16, fp32.*as --flops"):
        make_plan(read_model(configs.LLAMA2_7B), find_device("t4"), Workload(dtype="bf16"))
    assert {dtype for device in DEVICES.values() for dtype in device.flops_per_s} == {"fp16", "bf16", "fp32"}
    with pytest.raises(ConfigError, match="'mine' has a bandwidth of nan"):
        Device(name="mine", title="", memory_bytes=1, bandwidth_bytes_per_s=float("nan"), flops_per_s={}, source="")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e300, 1e-300])
@pytest.mark.parametrize(
    ("name", "what"),
    [("memory_gb", "memory"), ("bandwidth_gb_per_s", "bandwidth"), ("tflops", "rate in fp16")],
)
def test_figures_of_your_own_device(name: str, what: str, value: float) -> None:
    flag, unit = {
        "memory_gb": ("--memory", "GB"),
        "bandwidth_gb_per_s": ("--bandwidth", "GB/s"),
        "tflops": ("--flops", "TFLOP/s"),
    }[name]
    figures = {"memory_gb": 80.0, "bandwidth_gb_per_s": 1000.0, "tflops": 100.0, name: value}
    with pytest.raises(ConfigError) as caught:
        custom_device("fp16", **figures)
    said = f"has a {what} of {value:g} {unit} ({flag}); allowed: 0.000001 to 1,000,000,000 {unit}"
    assert said in str(caught.value)


def test_a_context_beyond_the_models_positions_warns() -> None:
    found = make_plan(read_model(configs.LLAMA2_7B), H100, Workload(context=8192))
    assert any("context 8,192 is beyond the 4,096 positions" in w for w in found.warnings)
    assert not make_plan(read_model(configs.LLAMA2_7B), H100, Workload(context=4096)).warnings


def test_another_format_than_the_checkpoints_warns() -> None:
    found = make_plan(read_model(configs.LLAMA31_8B), find_device("t4"), Workload())
    assert found.dtype == "fp16"
    assert any("the checkpoint is bf16; this plan is for fp16" in w for w in found.warnings)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="did you mean 'smollm2'"):
        read_model("smolm2")
    with pytest.raises(ModelLoadError, match=r"there is no config\.json in it"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="holds a list"):
        read_model(tmp_path / "config.json")


def write_safetensors(path: Path, tensors: dict[str, list[int]]) -> None:
    """Write a header that promises tensors, and none of their bytes."""
    rows, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * shape[-1]
        rows[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(rows).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_files_at_hand_are_counted(tmp_path: Path) -> None:
    """Of an unknown model type by the names of its tensors, whose header is all that is read."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    fields = configs.LLAMA2_7B | {"model_type": "no_such_type"} | experts
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = {"model.embed_tokens.weight": [10, 4], "lm_head.weight": [10, 4], "model.layers.0.q.weight": [4, 4]}
    write_safetensors(tmp_path / "model-1.safetensors", {**tensors, "model.layers.0.mlp.experts.3.w1.weight": [6, 4]})
    weights = read_model(tmp_path).weights
    assert (weights.embedding, weights.head, weights.dense, weights.experts) == (40, 40, 16, 24)
    assert weights.source == "the files' headers"
    (tmp_path / "config.json").write_text(json.dumps(configs.LLAMA2_7B))
    assert "the files hold 120 weights" in read_model(tmp_path).notes[0]
    (tmp_path / "model-1.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelLoadError, match="no whole safetensors file"):
        read_model(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 13476831232}}))
    found = read_model(tmp_path)
    assert found.stored is not None
    assert found.stored.num_bytes == 2 * found.weights.total


def test_quantised_checkpoints_are_named(tmp_path: Path) -> None:
    fields = configs.LLAMA2_7B | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    found = make_plan(read_model(fields), H100)
    assert any("quantised (gptq)" in w for w in found.warnings)


def test_a_text_part_is_what_is_planned() -> None:
    whole = {"model_type": "llava", "text_config": configs.LLAMA2_7B, "vision_config": {"hidden_size": 1024}}
    assert read_model(whole).shape == read_model(configs.LLAMA2_7B).shape


def test_the_built_in_model() -> None:
    model = read_model("smollm2")
    assert model.weights.total == 134_515_008  # as on its card
    assert model.stored is not None
    assert sum(tensor.count for tensor in model.stored.tensors) == model.weights.total
    assert (model.shape.attention, model.shape.num_kv_heads, model.shape.tied) == ("GQA", 3, True)
