"""Numbers of weights: published ones, and those of transformers' own classes."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.models.sizes import named_parameters
from specdec.planner import read_model
from specdec.planner.weights import count_by_formula, count_by_name, counted_families
from tests.models.architectures import SUPPORTED, Architecture
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


COUNTED = [a for a in SUPPORTED if a.model_type in counted_families()]


@pytest.mark.parametrize("architecture", COUNTED, ids=str)
def test_formulas_are_transformers_counts(architecture: Architecture) -> None:
    fields = fields_of(architecture)
    model = read_model(fields)
    assert model.weights.source == "formula"
    expected = count_by_name(named_parameters(fields), "")
    assert (model.weights.dense, model.weights.experts) == (expected.dense, expected.experts)
    assert (model.weights.embedding, model.weights.head) == (expected.embedding, expected.head)


def test_every_family_is_compared() -> None:
    compared = {a.model_type for a in COUNTED}
    assert compared | {"deepseek_v2"} == set(counted_families())


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
