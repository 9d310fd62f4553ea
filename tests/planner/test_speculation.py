"""Whether drafting pays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.planner import Plan, Workload, find_device, make_plan, read_model
from specdec.planner.speculation import Speculation, tokens_per_step
from tests.planner import configs


def plan(config: dict[str, Any] = configs.LLAMA31_8B, device: str = "h100", **load: Any) -> Plan:
    return make_plan(read_model(config), find_device(device), Workload(**{"dtype": "bf16", **load}))


@pytest.mark.parametrize(("acceptance", "drafts", "expected"), [(0, 4, 1), (1, 4, 5), (0.5, 1, 1.5), (0.8, 4, 3.3616)])
def test_tokens_per_step(acceptance: float, drafts: int, expected: float) -> None:
    assert tokens_per_step(acceptance, drafts) == pytest.approx(expected)
    assert tokens_per_step(acceptance, drafts) == pytest.approx(sum(acceptance**i for i in range(drafts + 1)))


def test_published_speedup() -> None:
    """(1 - a^(g+1)) / ((1 - a)(g c + 1)), for a forward that costs the same for one row and for g + 1.

    Source: Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8.
    """
    spec = Speculation(0.8, verify=lambda batch, k: 1.0, draft=lambda batch, k: 0.1 * k)
    for drafts in (1, 4, 10):
        expected = (1 - 0.8 ** (drafts + 1)) / ((1 - 0.8) * (0.1 * drafts + 1))
        assert spec.at(1, drafts).speedup == pytest.approx(expected)
    best = spec.best(1)
    assert best.speedup == max(choice.speedup for choice in spec.curve(1))


def test_a_drafter_that_costs_as_much_as_the_target_never_pays() -> None:
    spec = Speculation(1.0, verify=lambda batch, k: 1.0, draft=lambda batch, k: float(k))
    assert not spec.pays(1)
    assert spec.break_even(1) is None
    assert spec.paying_batches() is None


def test_break_even_is_the_edge() -> None:
    spec = Speculation(0.9, verify=lambda batch, k: 1.0, draft=lambda batch, k: 0.25 * k)
    edge = spec.break_even(1)
    assert edge == pytest.approx(0.25, abs=1e-3)  # one more token with probability a, for 0.25 of a step
    assert edge is not None
    assert spec.pays(1, edge)
    assert not spec.pays(1, edge - 1e-3)


def test_batch_crossover_is_where_arithmetic_begins_to_bound() -> None:
    """Up to 10 rows a forward costs the same, then as many tenths: a batch of b has room for 10 - b drafts."""
    spec = Speculation(0.5, verify=lambda b, k: max(1.0, b * (k + 1) / 10), draft=lambda b, k: 0.0)
    assert spec.paying_batches() == (1, 7)  # at b = 7: 1.5 tokens for 14 rows, 1.5 / 1.4 > 1; at 8, 1.5 / 1.6
    assert not spec.pays(8)
    assert spec.best(1).num_draft_tokens == 9


def test_crossover_on_an_h100() -> None:
    found = plan(context=128, drafter="ngram", acceptance=0.6)
    batches = found.speculation.paying_batches()
    assert batches is not None
    first, last = batches
    assert first == 1
    assert last is not None
    # Rows of a step at the balance point are compute-bound: near it drafting stops paying.
    assert 100 < last < 300
    assert found.speculation.pays(last)
    assert not found.speculation.pays(last + 1)


def test_long_contexts_leave_room_for_drafts() -> None:
    """Reading keys and values costs the same for one row and for several: speculation pays at any batch."""
    assert plan(context=131072, drafter="ngram", acceptance=0.6).speculation.paying_batches() == (1, None)


def test_drafts_wake_experts() -> None:
    """Rows of a draft choose experts of their own, so that verifying costs more than for a dense model."""
    dense, sparse = plan(configs.LLAMA31_8B, drafter="ngram"), plan(configs.MIXTRAL_8X7B, drafter="ngram")
    costs = [p.speculation.at(1, 3).verify_s / p.speculation.at(1, 0).verify_s for p in (dense, sparse)]
    assert costs[0] == pytest.approx(1, abs=0.01)
    assert costs[1] > 2


def test_none_and_the_free_drafters() -> None:
    assert plan(drafter="none").to_dict()["speculation"] is None
    found = plan(drafter="suffix", acceptance=0.5).to_dict()["speculation"]
    assert found["pays"]
    assert found["cost_ratio"] == 0
    assert found["break_even_acceptance"] < 0.01
    assert len(found["curve"]) == 17
    assert not plan(drafter="suffix", acceptance=0).to_dict()["speculation"]["pays"]


def test_a_draft_model_costs_its_share() -> None:
    options = {"model": configs.LLAMA32_1B}
    found = plan(drafter="draft_model", drafter_options=options, context=1).to_dict()
    # 1.24 of 7.5 billion weights are read per draft token; the target's embedding is not.
    assert found["speculation"]["cost_ratio"] == pytest.approx(1.236 / 7.505, rel=0.01)
    assert found["memory"]["drafter_weight_bytes"] == pytest.approx(2 * 1.236e9, rel=1e-3)


def test_early_exit_costs_its_layers_and_the_output_matrix() -> None:
    shape = {"drafter": "early_exit", "context": 1}
    half = plan(drafter_options={"num_layers": 16}, **shape).to_dict()["speculation"]["cost_ratio"]
    assert half == pytest.approx((6.979 / 2 + 0.525) / 7.505, rel=0.01)
    assert plan(**shape).to_dict()["memory"]["drafter_weight_bytes"] == 0


def test_medusa_drafts_in_one_pass_and_no_further_than_its_heads() -> None:
    found = plan(drafter="medusa", acceptance=1.0).to_dict()["speculation"]
    assert [row["num_draft_tokens"] for row in found["curve"]] == [0, 1, 2, 3, 4, 5]
    assert found["best"]["num_draft_tokens"] == 5


def test_a_measured_ratio_takes_the_place_of_the_computed() -> None:
    found = plan(drafter="eagle3", cost_ratio=0.3).to_dict()["speculation"]
    assert found["cost_ratio"] == pytest.approx(0.3)
    own = plan(drafter="my.package:Drafter", cost_ratio=0.3).to_dict()["speculation"]
    assert own["best"] == found["best"]


def test_a_trained_heads_folder_is_its_drafter(tmp_path: Path) -> None:
    for fields, kind in (
        ({"kind": "eagle", "head": {"generation": 3}}, "eagle3"),
        ({"kind": "medusa"}, "medusa"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"medusa_num_heads": 3}, "medusa"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert plan(drafter=str(tmp_path)).drafter.name == kind
    (tmp_path / "config.json").write_text(json.dumps(configs.LLAMA32_1B))
    assert plan(drafter=str(tmp_path)).drafter.name == "draft_model"
