"""Numbers of weights: published ones, and those of transformers' own classes."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.models.sizes import named_parameters
from specdec.planner import read_model
from specdec.planner.weights import count_by_formula, count_by_name, counted_families
from tests.models.architectures import SUPPORTED, Architecture, named
from tests.planner import configs

# What the models' papers and cards say, in billions.
PUBLISHED: list[tuple[dict[str, Any], float, float]] = [
    (configs.LLAMA2_7B, 6.738, 6.738),
    (configs.LLAMA2_13B, 13.016, 13.016),
    (configs.LLAMA2_70B, 68.977, 68.977),
    (configs.LLAMA31_8B, 8.030, 8.030),
    (configs.LLAMA32_1B, 1.236, 1.236),
    (configs.MISTRAL_7B, 7.242, 7.242),
    (configs.MIXTRAL_8X7B, 46.703, 12.879),
    (configs.QWEN2_7B, 7.616, 7.616),
    (configs.GEMMA2_9B, 9.242, 9.242),
    (configs.DEEPSEEK_V3, 671.0, 37.6),  # "671B, 37B active": without the embedding 36.6
]


@pytest.mark.parametrize(
    ("config", "total", "active"), PUBLISHED, ids=lambda v: v.get("model_type") if isinstance(v, dict) else str(v)
)
def test_published_counts(config: dict[str, Any], total: float, active: float) -> None:
    model = read_model(config)
    assert model.weights.total / 1e9 == pytest.approx(total, rel=1e-3)
    assert model.num_active / 1e9 == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize(
    ("config", "gigabytes"), [(configs.LLAMA2_7B, 14), (configs.LLAMA2_13B, 26), (configs.LLAMA2_70B, 140)]
)
def test_bytes_in_fp16(config: dict[str, Any], gigabytes: float) -> None:
    assert 2 * read_model(config).weights.total / 1e9 == pytest.approx(gigabytes, rel=0.04)


def fields_of(architecture: Architecture) -> dict[str, Any]:
    """Return a tiny config.json as transformers writes it."""
    from transformers import AutoConfig

    fields: dict[str, Any] = AutoConfig.for_model(architecture.model_type, **architecture.options).to_dict()
    return fields


DEEPSEEK = named("deepseek_v3").options
COUNTED = [
    *(a for a in SUPPORTED if a.model_type in counted_families()),
    Architecture("deepseek_v2", "deepseek_v2", DEEPSEEK),
    Architecture("deepseek_v2_lite", "deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True}),
]


@pytest.mark.parametrize("architecture", COUNTED, ids=str)
def test_formulas_are_transformers_counts(architecture: Architecture) -> None:
    fields = fields_of(architecture)
    model = read_model(fields)
    assert model.weights.source == "formula"
    expected = count_by_name(named_parameters(fields), "")
    assert (model.weights.dense, model.weights.experts) == (expected.dense, expected.experts)
    assert (model.weights.embedding, model.weights.head) == (expected.embedding, expected.head)


def test_every_family_is_compared() -> None:
    assert {a.model_type for a in COUNTED} == set(counted_families())


def test_tied_weights_and_biases() -> None:
    from transformers import AutoConfig

    options = {**next(a for a in SUPPORTED if a.name == "llama").options, "tie_word_embeddings": True, "mlp_bias": True}
    fields = AutoConfig.for_model("llama", **options).to_dict()
    model = read_model(fields)
    assert model.weights.total == sum(count for _, count in named_parameters(fields))
    assert model.weights.head == 0
    assert model.weights.output_matrix(model.shape) == model.weights.embedding


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "opt"])
def test_other_types_are_counted_by_transformers(name: str) -> None:
    fields = fields_of(next(a for a in SUPPORTED if a.name == name))
    model = read_model(fields)
    assert count_by_formula(model.shape) is None
    assert "transformers" in model.weights.source
    assert model.weights.total == sum(count for _, count in named_parameters(fields))
    assert (model.weights.experts > 0) == (model.shape.experts is not None)


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_config_says_whether_the_output_matrix_of_its_text_part_is_tied(tied: bool) -> None:
    text = {key: value for key, value in named("llama4").options.items() if key != "tie_word_embeddings"}
    fields = {"model_type": "llama4", "tie_word_embeddings": tied, "text_config": {**text, "model_type": "llama4_text"}}
    weights = read_model(fields).weights
    assert (weights.head == 0) == tied
    assert weights.total == sum(count for _, count in named_parameters(fields))


def test_parts_are_told_apart_by_name() -> None:
    names = {
        "model.layers.0.block_sparse_moe.input_linear.weight": 1,  # Granite's experts
        "model.layers.0.shared_mlp.input_linear.weight": 10,
        "model.layers.0.mlp.experts.3.down_proj.weight": 100,
        "model.layers.0.mlp.experts.router.weight": 1000,
        "model.layers.0.mlp.shared_experts.up_proj.weight": 10_000,
    }
    weights = count_by_name(names.items(), "")
    assert (weights.experts, weights.dense) == (101, 11_010)


def test_experts_that_are_no_choice_are_dense() -> None:
    """One expert that every token takes, and fields of experts that the class does not use."""
    hunyuan = {"model_type": "hunyuan_v1_moe", "num_experts": 1, "moe_topk": 1, "head_dim": 8}
    model = read_model({**named("llama").options, **hunyuan})
    assert (model.shape.experts, model.weights.experts, model.num_active) == (None, 0, model.weights.total)
    doge = {"model_type": "doge", "is_moe": False, "num_experts": 16, "num_experts_per_tok": 2}
    assert read_model({**named("llama").options, **doge}).shape.experts is None
