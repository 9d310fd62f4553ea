"""Every field that is read has values that it may have, and an answer to any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError, ModelLoadError, SpecdecError
from specdec.planner import Workload, find_device, make_plan, read_model
from specdec.planner.fields import _ALLOWED, Fields
from tests.planner import configs, hub

STRANGE: list[Any] = ["x", [0.5], -1, 0.5, True, 10**30, {"a": 1}, [["full_attention"]], float("nan")]
ACCEPTED = {  # of the strange ones, by field
    "model_type": ["x"],
    "dtype": ["x"],
    "torch_dtype": ["x"],
    **{name: [True] for name, (_, allowed) in _ALLOWED.items() if allowed == "true or false"},
    **{name: [{"a": 1}] for name, (_, allowed) in _ALLOWED.items() if allowed.startswith("an object")},
}


@pytest.mark.parametrize("field", _ALLOWED)
def test_strange_values_are_answered(field: str) -> None:
    for value in STRANGE:
        if value in ACCEPTED.get(field, []):
            continue
        with pytest.raises(ConfigError) as caught:
            Fields({field: value}, "my model").check()
        assert f"my model: {field} is {value!r} in its config" in str(caught.value)
        assert "; allowed: " in str(caught.value)
    Fields({field: None}, "my model").check()


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (configs.DEEPSEEK_V3, {"n_shared_experts": "x"}),
        (configs.DEEPSEEK_V3, {"first_k_dense_replace": [0, 1]}),
        (configs.DEEPSEEK_V3, {"moe_layer_freq": "x"}),
        (configs.DEEPSEEK_V3, {"num_hidden_layers": 10_001}),
        (configs.QWEN2_7B, {"max_window_layers": "x", "use_sliding_window": True}),
        (configs.QWEN2_7B, {"sliding_window": -5}),
        (hub.GEMMA3_1B, {"sliding_window_pattern": -1}),
        (hub.GEMMA3_4B, {"text_config": {**hub.GEMMA3_4B["text_config"], "sliding_window": "abc"}}),
        (configs.LLAMA2_7B, {"layer_types": "x"}),
        (configs.LLAMA2_7B, {"attention_chunk_size": -1}),
        (configs.LLAMA2_7B, {"tie_word_embeddings": "no"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and len(value) < 3 else "",
)
def test_in_a_config(config: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"allowed: "):
        read_model(config | changes)


def test_a_window_of_nothing_is_none() -> None:
    assert read_model(configs.MISTRAL_7B | {"sliding_window": 0}).shape.windows == (None,) * 32


def test_the_largest_numbers_that_are_allowed_plan(tmp_path: Path) -> None:
    most = {"num_hidden_layers": 10_000, "max_position_embeddings": 10**15, "vocab_size": 10**9}
    model = read_model(configs.LLAMA2_7B | most)
    assert not make_plan(model, find_device("h100"), Workload()).memory["fits"]


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", "\x00"])
def test_files_that_are_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        read_model(tmp_path)


def test_a_file_of_an_index_may_be_damaged_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.LLAMA2_7B))
    for text in ("[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', "{}", "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(SpecdecError, match="no index of safetensors files"):
            read_model(tmp_path)
