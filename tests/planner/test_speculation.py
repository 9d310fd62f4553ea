"""Whether drafting pays."""

from __future__ import annotations

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
    assert spec.paying_batches() == []


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
    assert spec.paying_batches() == [(1, 7)]  # at b = 7: 1.5 tokens for 14 rows, 1.5 / 1.4 > 1; at 8, 1.5 / 1.6
    assert spec.paying_batches(most=5) == [(1, 5)]
    assert not spec.pays(8)
    assert spec.best(1).num_draft_tokens == 9


@pytest.mark.parametrize(
    "wanted",
    [[(3, 3)], [(1, 1), (10, 4096)], [(9, 57)], [(200, 900), (1500, 1777)], [(1, 128), (135, 4000)], [(4096, 4096)]],
)
def test_every_range_of_batches_is_found(wanted: list[tuple[int, int]]) -> None:
    """Small and large batches may differ from what lies between: each edge is looked for on its own."""

    def verify(batch: int, drafts: int) -> float:
        return 1.0 if not drafts or any(first <= batch <= last for first, last in wanted) else 9.0

    spec = Speculation(0.5, verify=verify, draft=lambda b, k: 0.0)
    assert spec.paying_batches() == wanted
    assert all(spec.pays(first) and spec.pays(last) for first, last in wanted)


def test_a_batch_that_is_asked_for_is_looked_at() -> None:
    spec = Speculation(0.5, verify=lambda b, k: 1.0 if b == 3001 or not k else 9.0, draft=lambda b, k: 0.0)
    assert spec.paying_batches() == []
    assert spec.paying_batches(also=(3001, 5000)) == [(3001, 3001)]


def test_experts_may_make_drafting_pay_only_beyond_a_batch() -> None:
    """Qwen3-30B-A3B: few rows wake new experts, many find them awake."""
    spec = plan(configs.QWEN3_30B_A3B, context=2048, drafter="eagle3", acceptance=0.5).speculation
    assert spec.paying_batches(most=256) == [(9, 256)]
    assert [batch for batch in range(1, 257) if spec.pays(batch)] == list(range(9, 257))


def test_crossover_on_an_h100() -> None:
    found = plan(context=128, drafter="ngram", acceptance=0.6)
    ((first, last),) = found.speculation.paying_batches()
    assert first == 1
    # Rows of a step at the balance point are compute-bound: near it drafting stops paying.
    assert 100 < last < 350
    assert found.speculation.pays(last)
    assert not found.speculation.pays(last + 1)


def test_long_contexts_leave_room_for_drafts() -> None:
    """Reading keys and values costs the same for one row and for several: speculation pays at any batch."""
    assert plan(context=131072, drafter="ngram", acceptance=0.6).speculation.paying_batches() == [(1, 4096)]


def test_batches_end_where_memory_does() -> None:
    found = plan(context=131072, drafter="ngram", acceptance=0.6)
    most = found.memory["max_batch"]
    assert found.to_dict()["speculation"]["pays_at_batches"] == [[1, most]]
    assert found.to_dict()["speculation"]["tried_up_to_batch"] == most < 10
    none = plan(configs.LLAMA2_70B, device="l4", context=131072, drafter="ngram", acceptance=0.6).to_dict()
    assert none["memory"]["max_batch"] == 0
    assert none["speculation"]["tried_up_to_batch"] == 4096


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


def test_acceptance_and_ratio_without_a_drafter_warn() -> None:
    def said(**load: Any) -> str:
        return " ".join(plan(**load).warnings)

    assert "--acceptance has no effect without a drafter" in said(acceptance=0.7)
    assert "--cost-ratio has no effect" in said(cost_ratio=0.1)
    assert "--acceptance and --cost-ratio have no effect" in said(acceptance=0.7, cost_ratio=0.1)
    assert not said()
    assert not said(drafter="ngram", acceptance=0.7, cost_ratio=0.1)


def test_an_acceptance_that_was_not_given_is_said_to_be_a_guess() -> None:
    found = plan(drafter="ngram")
    assert found.to_dict()["workload"]["acceptance"] == found.speculation.acceptance == 0.7
    assert any("a guess" in text for text in found.assumptions)
    assert not any("a guess" in text for text in plan(drafter="ngram", acceptance=0.7).assumptions)
