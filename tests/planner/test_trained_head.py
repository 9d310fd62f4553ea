"""Trained heads are planned by their own configs, whatever layout these are in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError, IncompatibleDrafterError, ModelLoadError
from specdec.planner import Plan, Workload, find_device, make_plan, read_model
from tests.planner import configs

H, V, INNER = 4096, 128256, 14336  # of Llama-3.1-8B
LAYER = H * (4096 + 2 * 1024) + 4096 * H + 3 * H * INNER  # one of its decoder layers, without norms
WIDER = H * (4096 + 2 * 1024)  # of EAGLE-3's first layer, which attends over embedding and hidden state
FUSE = 3 * H * H


def plan(drafter: str, config: dict[str, Any] = configs.LLAMA31_8B, **load: Any) -> Plan:
    return make_plan(read_model(config), find_device("h100"), Workload(dtype="bf16", drafter=drafter, **load))


@pytest.fixture
def head(tmp_path: Path) -> Any:
    def write(fields: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"kind": "eagle", "head": {"generation": 3}}, "eagle3"),
        ({"kind": "eagle", "head": {"generation": 1}}, "eagle"),
        ({"kind": "medusa", "head": {"num_heads": 2}}, "medusa"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": H}}, "eagle3"),
        ({"model_type": "eagle", "model": {"hidden_size": H}}, "eagle"),
        ({"medusa_num_heads": 3}, "medusa"),
        ({"architectures": ["MedusaModel"], "num_heads": 3}, "medusa"),
        (configs.LLAMA32_1B, "draft_model"),
    ],
)
def test_a_folder_is_its_drafter(head: Any, fields: dict[str, Any], kind: str) -> None:
    assert plan(head(fields)).drafter.name == kind


@pytest.mark.parametrize(
    ("fields", "num_heads", "weights"),
    [
        ({"medusa_num_heads": 3, "medusa_num_layers": 2}, 3, 3 * (2 * H * H + H * V)),
        ({"medusa_num_heads": 3, "num_hidden_layers": 32, "vocab_size": V}, 3, 3 * (H * H + H * V)),  # in a whole model
        ({"kind": "medusa", "head": {"num_heads": 4, "own_heads": False, "num_layers": 1}}, 4, 4 * H * H),
        (
            {"kind": "medusa", "head": {"num_heads": 4, "own_heads": False, "draft_vocab_size": 8192}},
            4,
            4 * H * H + 8192 * H,
        ),
        ({"architectures": ["MedusaModel"], "num_heads": 2, "original_lm_head": True}, 2, 2 * H * H),
        ({"architectures": ["MedusaModel"], "num_heads": 2, "truncated_vocab_size": 100}, 2, 2 * (H * H + 100 * H)),
    ],
)
def test_medusa(head: Any, fields: dict[str, Any], num_heads: int, weights: int) -> None:
    found = plan(head(fields), acceptance=0.99)
    assert found.drafter.most == num_heads
    assert found.best.num_draft_tokens == num_heads
    assert found.memory["drafter_weight_bytes"] == 2 * weights


def test_a_shared_output_matrix_is_read_once(head: Any) -> None:
    found = plan(head({"kind": "medusa", "head": {"num_heads": 4, "own_heads": False}})).drafter
    assert found.seconds(1, 3) == pytest.approx(2 * (3 * H * H + H * V) / 3.35e12)


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({}, FUSE + LAYER + WIDER + V * H),
        ({"draft_vocab_size": 8192}, FUSE + LAYER + WIDER + 8192 * H),
        ({"intermediate_size": 4096}, FUSE + LAYER - 3 * H * (INNER - 4096) + WIDER + V * H),
        ({"num_hidden_layers": 2}, FUSE + 2 * LAYER + WIDER + V * H),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, 2 * H * H + LAYER + WIDER + V * H),
    ],
)
def test_eagle3(head: Any, fields: dict[str, Any], weights: int) -> None:
    found = plan(head({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": H, "draft_vocab_size": V, **fields}))
    assert found.memory["drafter_weight_bytes"] == pytest.approx(2 * weights, rel=1e-4)  # but for norms


def test_our_own_heads_share_the_targets_output_matrix(head: Any) -> None:
    found = plan(head({"kind": "eagle", "head": {"generation": 3, "draft_vocab_size": V}}))
    assert found.memory["drafter_weight_bytes"] == pytest.approx(2 * (FUSE + LAYER + WIDER), rel=1e-4)


def test_narrow_heads_have_narrow_caches(head: Any) -> None:
    fields = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
    found = plan(head({"architectures": ["LlamaForCausalLMEagle3"], **fields}), context=1000, batch=3)
    assert found.memory["drafter_kv_bytes"] == 3 * 1000 * 2 * 2 * (64 + 64) * 2


def test_a_shipped_head_is_planned_by_name() -> None:
    found = make_plan(read_model("smollm2"), find_device("h100"), Workload(drafter="smollm2-eagle3", context=100))
    assert found.drafter.name == "eagle3"
    assert any("smollm2-eagle3" in text and "8,192 tokens" in text for text in found.assumptions)
    small = make_plan(read_model("smollm2"), find_device("h100"), Workload(drafter="smollm2-draft_model", context=100))
    assert small.drafter.name == "draft_model"
    assert small.memory["drafter_weight_bytes"] == pytest.approx(2 * small.model.weights.dense * 4 / 30, rel=1e-3)
    assert small.memory["drafter_kv_bytes"] == 100 * 4 * 3 * (64 + 64) * 2


def test_the_option_names_the_same(head: Any) -> None:
    folder = head({"medusa_num_heads": 3})
    assert (
        plan(folder).to_dict()["speculation"]
        == plan("medusa", drafter_options={"model": folder}).to_dict()["speculation"]
    )


def test_a_measured_ratio_leaves_the_memory(head: Any, tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps(configs.LLAMA32_1B))
    for drafter in (head({"medusa_num_heads": 3}), str(tmp_path / "small.json"), "eagle3", "self_int8"):
        measured, computed = plan(drafter, cost_ratio=0.2), plan(drafter)
        assert measured.memory["drafter_weight_bytes"] == computed.memory["drafter_weight_bytes"] > 0
        assert measured.memory["drafter_kv_bytes"] == computed.memory["drafter_kv_bytes"]
        assert measured.drafter.most == computed.drafter.most
        assert measured.to_dict()["speculation"]["cost_ratio"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("eagle3", {"nonsense": 1}, "has no option 'nonsense'"),
        ("eagel3", {}, "did you mean 'eagle3'"),
        ("my.own:Drafter", {"depth": 1}, "has no option 'depth'"),
        ("draft_model", {"model": 5}, "model=5 is no name of a model"),
        ("eagle3", {"model": 5}, "model=5 is no name of a model"),
        ("medusa", {"model": "no/such/folder"}, "no config.json that can be read"),
    ],
)
@pytest.mark.parametrize("cost_ratio", [None, 0.1])
def test_names_and_options_are_never_dropped(
    drafter: str, options: dict[str, Any], message: str, cost_ratio: float | None
) -> None:
    if ":" in drafter and cost_ratio is None:
        message = "give its measured --cost-ratio"
    with pytest.raises(ConfigError) as caught:
        plan(drafter, drafter_options=options, cost_ratio=cost_ratio)
    assert message in str(caught.value)


def test_registered_drafters_without_arithmetic_need_a_ratio() -> None:
    with pytest.raises(ConfigError, match="give its measured --cost-ratio"):
        plan("random")
    assert plan("random", cost_ratio=0.1).drafter.name == "random"


def test_heads_that_do_not_fit(head: Any, tmp_path: Path) -> None:
    folder = head({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 2048})
    with pytest.raises(IncompatibleDrafterError, match="hidden size 2,048 and 128,256 tokens; this one has 4,096"):
        plan(folder)
    with pytest.raises(IncompatibleDrafterError, match="is for --drafter eagle3, not medusa"):
        plan("medusa", drafter_options={"model": folder})
    with pytest.raises(IncompatibleDrafterError, match="is a trained head for --drafter eagle3"):
        plan("draft_model", drafter_options={"model": folder})
    with pytest.raises(ConfigError, match="is a model or head itself"):
        plan(folder, drafter_options={"model": "other"})
    with pytest.raises(ConfigError, match="medusa_num_heads is 0; allowed: a whole number above 0"):
        plan(head({"medusa_num_heads": 0}))
    with pytest.raises(ConfigError, match="how many Medusa heads"):
        plan(head({"architectures": ["MedusaModel"]}))
    with pytest.raises(ConfigError, match="layers is 'all'"):
        plan(head({"kind": "draft_model", "head": {"layers": "all"}}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError):
        plan(folder)
