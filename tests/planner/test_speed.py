"""Floors of both phases: published arithmetic, and what must hold between them."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.planner import Plan, Workload, custom_device, find_device, make_plan, read_model
from specdec.planner.roofline import Part, Phase, Rates
from tests.planner import configs


def plan(config: dict[str, Any], device: str = "generic-1tb", **load: Any) -> Plan:
    return make_plan(read_model(config), find_device(device), Workload(dtype="fp16", **load))


@pytest.mark.parametrize(("config", "milliseconds"), [(configs.LLAMA2_7B, 14), (configs.LLAMA2_70B, 140)])
def test_a_terabyte_per_second_bounds_a_token(config: dict[str, Any], milliseconds: float) -> None:
    found = plan(config, context=1)
    assert 1e3 * found.tpot_floor_s == pytest.approx(milliseconds, rel=0.06)
    assert found.decode.bound == "memory"


def test_balance_of_an_h100() -> None:
    assert find_device("h100").balance("fp16") == pytest.approx(989e12 / 3.35e12, rel=1e-3)
    assert find_device("h100").balance("bf16") == pytest.approx(300, rel=0.02)


def test_intensity_of_one_token() -> None:
    assert plan(configs.LLAMA2_7B, context=1).decode.intensity == pytest.approx(1, rel=0.01)


def test_intensity_grows_with_the_batch_until_arithmetic_bounds() -> None:
    bounds = [plan(configs.LLAMA2_7B, "h100", context=1, batch=b).decode for b in (1, 64, 1024)]
    assert [phase.bound for phase in bounds] == ["memory", "memory", "compute"]
    assert bounds[1].intensity == pytest.approx(64, rel=0.02)


def test_prefill_of_a_long_prompt_is_compute_bound() -> None:
    found = plan(configs.LLAMA2_7B, "h100", context=4096)
    assert found.prefill.bound == "compute"
    matrices = 6.738e9 - 2 * 32000 * 4096  # the output matrix is for one row only
    attention = 32 * 32 * 4 * 128 * 4096 * 4097 / 2
    assert found.prefill.flops == pytest.approx(2 * matrices * 4096 + attention, rel=1e-3)
    assert found.ttft_floor_s >= found.prefill.flops / 989.5e12


def test_a_short_prompt_is_memory_bound() -> None:
    found = plan(configs.LLAMA2_7B, "h100", context=16)
    assert found.prefill.bound == "memory"
    assert found.ttft_floor_s == pytest.approx(plan(configs.LLAMA2_7B, "h100", context=1).tpot_floor_s, rel=0.01)


def test_small_chunks_read_the_weights_more_often() -> None:
    times = [plan(configs.LLAMA2_7B, "h100", prefill_chunk_tokens=c) for c in (4096, 512, 64)]
    assert times[0].prefill.num_bytes < times[1].prefill.num_bytes < times[2].prefill.num_bytes
    assert times[0].ttft_floor_s == times[1].ttft_floor_s < times[2].ttft_floor_s  # once memory bounds
    assert times[2].prefill.bound == "memory"
    # The same arithmetic whatever the chunks.
    assert times[0].prefill.flops == times[2].prefill.flops


def test_long_contexts_are_paid_for_by_decode() -> None:
    short, long = (plan(configs.LLAMA2_7B, context=c) for c in (1, 32768))
    assert long.tpot_floor_s - short.tpot_floor_s == pytest.approx(16 * 2**30 / 1e12, rel=1e-3)
    windowed = plan(configs.MISTRAL_7B, context=32768)
    assert windowed.tpot_floor_s == plan(configs.MISTRAL_7B, context=4096).tpot_floor_s


def test_experts_are_read_at_least_as_one_row_chooses_them() -> None:
    """Two of eight whatever the rows: nothing keeps all rows of a step from choosing alike."""
    everything = 2 * read_model(configs.MIXTRAL_8X7B).weights.experts
    for batch in (1, 4, 64):
        found = plan(configs.MIXTRAL_8X7B, batch=batch, context=1)
        (part,) = (part for part in found.decode.parts if part.name == "experts")
        assert part.num_bytes == pytest.approx(everything * 2 / 8)
        assert part.flops == pytest.approx(batch * everything / 4)
        (part,) = (p for p in found.work.expected().decode(batch, 1).parts if p.name == "experts")
        assert part.num_bytes == pytest.approx(everything * (1 - 0.75**batch))
        (part,) = (p for p in found.work.prefill(1024, 512).parts if p.name == "experts")
        assert part.num_bytes == pytest.approx(2 * everything * 2 / 8)  # two chunks


def test_times_of_even_choice_stand_beside_the_floors() -> None:
    sparse = plan(configs.MIXTRAL_8X7B, "h100", batch=8, context=1024)
    found, spread = sparse.to_dict(), sparse.work.expected()
    assert found["decode"]["tpot_even_experts_s"] == spread.decode(8, 1024).seconds > 2 * sparse.tpot_floor_s
    assert found["prefill"]["ttft_even_experts_s"] == spread.prefill(1024, 512).seconds > sparse.ttft_floor_s
    assert found["speculation"] is None
    dense = plan(configs.LLAMA2_7B).to_dict()
    assert dense["decode"]["tpot_even_experts_s"] is dense["prefill"]["ttft_even_experts_s"] is None


def test_compressed_latent_attention_reads_less_and_computes_more() -> None:
    full = plan(configs.DEEPSEEK_V3, "h200", context=4096)
    compact = plan(configs.DEEPSEEK_V3, "h200", context=4096, kv_layout="compact")
    assert compact.decode.num_bytes < full.decode.num_bytes
    assert compact.decode.flops > full.decode.flops


def test_quantised_keys_and_values_shorten_long_decodes() -> None:
    times = [plan(configs.LLAMA2_7B, context=32768, kv_dtype=d).tpot_floor_s for d in ("fp16", "int8", "int4")]
    assert times[0] > times[1] > times[2]


def test_arithmetic_and_traffic_run_side_by_side() -> None:
    """Nothing forbids that one part computes while another is read: a sum of parts would be no floor."""
    rates = Rates(flops_per_s=10.0, bandwidth_bytes_per_s=1.0)
    phase = Phase((Part("a", 100.0, 1.0), Part("b", 1.0, 20.0)), rates)
    assert (phase.compute_s, phase.memory_s) == (10.1, 21.0)
    assert phase.seconds == 21
    assert phase.bound == "memory"
    assert [(row["name"], row["bound"], row["seconds"]) for row in phase.to_dict()["parts"]] == [
        ("a", "compute", 10),
        ("b", "memory", 20),
    ]
    assert Phase((Part("a", 300.0, 1.0),), rates).bound == "compute"


def test_your_own_device() -> None:
    own = custom_device("fp16", memory_gb=80, bandwidth_gb_per_s=3350, tflops=989.5)
    model = read_model(configs.LLAMA2_7B)
    assert make_plan(model, own).tpot_floor_s == make_plan(model, find_device("h100")).tpot_floor_s
