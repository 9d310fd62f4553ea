"""FLOPs and bytes of forwards, drafters and memory, against figures by hand for a tiny model.

Per layer: queries and output 64 weights each, keys and values 32 each, feed-forward 3 x 128, norms 16: 592. Two layers
and a last norm are 1,192 dense weights; the embedding and the output matrix have 256 each. In fp16 a token has
2 layers x 1 head x (4 + 4) x 2 = 32 bytes of keys and values. A pair of query and key costs 2 heads x 2 x (4 + 4) = 32
FLOPs in each of two layers.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from specdec.planner import Plan, Workload, custom_device, make_plan, read_model
from specdec.planner.kv import KvStorage
from specdec.planner.roofline import Phase
from tests.planner import configs

# One byte per nanosecond, and arithmetic that takes no time beside it.
SLOW_MEMORY = custom_device("fp16", memory_gb=1, bandwidth_gb_per_s=1, tflops=1000)


def plan(config: dict[str, Any] = configs.TINY, **load: Any) -> Plan:
    return make_plan(read_model(config), SLOW_MEMORY, Workload(**{"context": 10, "dtype": "fp16", **load}))


def figures(phase: Phase) -> dict[str, tuple[float, float]]:
    return {part.name: (part.flops, part.num_bytes) for part in phase.parts}


def test_the_weights_are_those_of_the_hand() -> None:
    weights = read_model(configs.TINY).weights
    assert (weights.dense, weights.embedding, weights.head) == (1192, 256, 256)


def test_decode() -> None:
    assert figures(plan(batch=3).decode) == {
        "dense layers": (2 * 1192 * 3, 2 * (1192 + 3 * 8)),  # and a row of the embedding each
        "output matrix": (2 * 256 * 3, 2 * 256),
        "attention": (3 * 11 * 64, 3 * (10 * 32 + 32)),  # reads ten tokens, writes one
    }


def test_verifying_writes_and_attends_with_every_row() -> None:
    step = plan(batch=3).work.decode(3, 10, rows=4)
    assert figures(step) == {
        "dense layers": (2 * 1192 * 12, 2 * (1192 + 12 * 8)),
        "output matrix": (2 * 256 * 12, 2 * 256),
        "attention": (3 * (11 + 12 + 13 + 14) * 64, 3 * (10 * 32 + 4 * 32)),
    }


def test_prefill_in_chunks() -> None:
    """Ten tokens in chunks of four: of 2, 4 and 4, which read 0, 2 and 6 tokens of before."""
    assert figures(plan(prefill_chunk_tokens=4).prefill) == {
        "dense layers": (2 * 1192 * 10, 2 * (3 * 1192 + 10 * 8)),
        "output matrix": (2 * 256, 2 * 256),
        "attention": (55 * 64, (2 + 6) * 32 + 10 * 32),
    }


def test_prompts_that_come_together_share_chunks() -> None:
    """Three of ten tokens in chunks of 16: two forwards, both with the end of a prompt in them."""
    found = plan(batch=3, prefill_chunk_tokens=16)
    assert figures(found.work.prefill(10, 16, batch=3)) == {
        "dense layers": (2 * 1192 * 30, 2 * (2 * 1192 + 30 * 8)),
        "output matrix": (2 * 256 * 3, 2 * 2 * 256),
        "attention": (3 * 55 * 64, 3 * 10 * 32),
    }
    last = 1e-9 * (2 * (2 * 1192 + 240) + 1024 + 960)
    assert found.last_ttft_floor_s == pytest.approx(last)
    assert found.to_dict()["prefill"]["last_ttft_floor_s"] == pytest.approx(last)
    assert found.to_dict()["prefill"]["tokens_per_s_at_most"] == pytest.approx(30 / last)
    assert last < 3 * found.ttft_floor_s


def test_the_last_of_many_short_prompts_waits_for_one_forward() -> None:
    load = {"prefill_chunk_tokens": 512}
    many, one = (plan(configs.LLAMA2_7B, batch=b, context=c, **load) for b, c in ((32, 16), (1, 512)))
    assert many.last_ttft_floor_s == pytest.approx(one.ttft_floor_s, rel=0.001)
    assert plan(batch=1).last_ttft_floor_s == plan(batch=1).ttft_floor_s


@pytest.mark.parametrize("window", [None, 1, 5, 8])
def test_no_cut_into_chunks_reads_less(window: int | None) -> None:
    storage = KvStorage(read_model(configs.MISTRAL_7B | {"sliding_window": window}).shape, "fp16")
    per_position = storage.bytes_per_token
    for tokens, chunk in product(range(1, 30), range(1, 9)):
        cuts = [
            sum(seen if window is None else min(seen, window) for seen in range(first, tokens, chunk))
            for first in range(1, chunk + 1)
        ]
        assert storage.bytes_read_again(tokens, chunk) == min(cuts) * per_position


@pytest.mark.parametrize("chunk", [7, 100, 170, 171, 512])
def test_compressed_prefill_takes_the_cheaper_way_for_each_chunk(chunk: int) -> None:
    """DeepSeek-V3: 128 heads of 192 + 128 as expanded, 2 x 512 + 64 as absorbed; expanding a row 512 x 256 per head."""
    storage = KvStorage(read_model(configs.DEEPSEEK_V3).shape, "bf16", "compact")
    total, start = 0, 0
    for rows in [3000 % chunk, *[chunk] * (3000 // chunk)]:
        pairs = rows * start + rows * (rows + 1) // 2
        total += 61 * 2 * 128 * min(pairs * (2 * 512 + 64), pairs * (192 + 128) + start * 512 * 256)
        start += rows
    assert storage.prefill_flops(3000, chunk) == total
    assert storage.flops(4096, 1) == 61 * 2 * 128 * 4097 * (2 * 512 + 64)  # one row works on latent rows


def test_a_long_compressed_prompt_costs_little_more_than_an_expanded_one() -> None:
    config = configs.DEEPSEEK_V3
    flops = [
        KvStorage(read_model(config).shape, "bf16", layout).prefill_flops(4096, 4096) for layout in ("full", "compact")
    ]
    assert flops[0] == flops[1]


def test_any_context_is_planned_at_once() -> None:
    found = plan(configs.MISTRAL_7B, context=10**9, batch=10**9, prefill_chunk_tokens=1)
    assert found.to_dict()["prefill"]["last_ttft_floor_s"] > 1e9
    assert any("beyond the 32,768 positions" in text for text in found.warnings)


def test_activations() -> None:
    """Four rows of a chunk: 2 x 8 of residual stream, 3 x 16 of feed-forward, ten of mask; logits of three rows."""
    assert plan(batch=3, prefill_chunk_tokens=4).memory["activation_bytes"] == 4 * (16 + 48 + 10) * 2 + 2 * 4 * 3 * 32
    wide = plan(configs.TINY | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}, batch=3)
    assert wide.memory["activation_bytes"] == 30 * (16 + 8 * 16 + 10) * 2 + 2 * 4 * 3 * 32


def test_self_int8_reads_a_byte_per_weight_and_the_targets_cache() -> None:
    found = plan(drafter="self_int8", batch=2).drafter
    assert found.weight_bytes == 1192 + 256
    assert found.seconds(2, 3) == pytest.approx(3e-9 * (1192 + 2 * 8 + 256 + 2 * 11 * 32))


def test_self_int8_computes_at_the_targets_rate() -> None:
    slow = custom_device("fp16", memory_gb=1, bandwidth_gb_per_s=1e6, tflops=1e-3)
    found = make_plan(read_model(configs.TINY), slow, Workload(context=10, dtype="fp16", drafter="self_int8"))
    assert found.drafter.seconds(1, 1) == pytest.approx((2 * 1192 + 2 * 256 + 11 * 64) / 1e9)


def test_early_exit_sees_the_windows_of_its_own_layers() -> None:
    config = configs.TINY | {"model_type": "gemma2", "sliding_window": 4, "head_dim": 4, "query_pre_attn_scalar": 4}
    found = plan(config, drafter="early_exit", drafter_options={"num_layers": 1})
    dense = round(found.model.weights.dense / 2)
    assert found.drafter.seconds(1, 1) == pytest.approx(1e-9 * (2 * (dense + 8 + 256) + 4 * 16 + 16))


def test_medusa_reads_each_head_once() -> None:
    found = plan(drafter="medusa", batch=2).drafter
    one = 8 * 8 + 8 * 32
    assert found.weight_bytes == 5 * one * 2
    assert found.seconds(2, 3) == pytest.approx(1e-9 * 3 * one * 2)
    slow = custom_device("fp16", memory_gb=1, bandwidth_gb_per_s=1e6, tflops=1e-3)
    found = make_plan(read_model(configs.TINY), slow, Workload(dtype="fp16", drafter="medusa")).drafter
    assert found.seconds(2, 3) == pytest.approx(2 * one * 3 * 2 / 1e9)


def test_eagle_1_fuses_in_every_step() -> None:
    """Queries and keys of 8 x (8 + 8), output 64, feed-forward 384, norms 16, and 16 x 8 that fuse."""
    found = plan(drafter="eagle").drafter
    assert found.weight_bytes == 2 * (128 + 64 + 384 + 16 + 128)  # its output matrix is the target's
    step = 2 * (720 + 8 + 256) + 11 * 16
    assert found.seconds(1, 3) == pytest.approx(3e-9 * step)


def test_eagle_3_fuses_once() -> None:
    """Attention reads 16 wide; 24 x 8 weights fuse three hidden states before the first step; 32 rows of output."""
    found = plan(drafter="eagle3").drafter
    dense = 256 + 64 + 384 + 16 + 16
    assert found.weight_bytes == 2 * (dense + 192 + 256)
    step = 2 * (dense + 8 + 256) + 11 * 16
    assert found.seconds(1, 3) == pytest.approx(1e-9 * (2 * 192 + 3 * step))
    assert found.kv is not None
    assert found.kv.bytes_per_token == 16
