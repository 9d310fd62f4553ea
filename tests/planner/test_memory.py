"""Keys and values, and what fits."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.planner import Workload, find_device, make_plan, read_model
from specdec.planner.kv import KvStorage, _pairs
from tests.planner import configs


def kv(config: dict[str, Any], dtype: str = "fp16", layout: str = "full") -> KvStorage:
    return KvStorage(read_model(config).shape, dtype, layout)


def test_llama2_7b() -> None:
    storage = kv(configs.LLAMA2_7B)
    assert storage.bytes_per_token == 512 * 2**10
    assert storage.bytes_per_request(4096) == 2 * 2**30
    assert storage.bytes_per_request(32768) == 16 * 2**30


@pytest.mark.parametrize(
    ("config", "kibibytes"),
    [(configs.LLAMA2_13B, 800), (configs.LLAMA2_70B, 320), (configs.LLAMA31_8B, 128), (configs.MIXTRAL_8X7B, 128)],
    ids=["mha", "gqa-70b", "gqa-8b", "moe"],
)
def test_published_bytes_per_token(config: dict[str, Any], kibibytes: int) -> None:
    assert kv(config).bytes_per_token == kibibytes * 2**10


def test_one_head_for_all() -> None:
    model = read_model(configs.LLAMA2_7B | {"num_key_value_heads": 1})
    assert model.shape.attention == "MQA"
    assert KvStorage(model.shape, "fp16").bytes_per_token == 16 * 2**10


@pytest.mark.parametrize(
    ("dtype", "per_head"), [("fp32", 8 * 128), ("fp16", 4 * 128), ("int8", 2 * (128 + 2)), ("int4", 2 * (64 + 2))]
)
def test_formats_and_their_scales(dtype: str, per_head: int) -> None:
    assert kv(configs.LLAMA31_8B, dtype).bytes_per_token == 32 * 8 * per_head


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_sizes_are_the_caches(dtype: str) -> None:
    import torch

    from specdec.kv.codecs import QuantisedKV

    stored = QuantisedKV(dtype).encode(0, torch.ones(1, 8, 128), torch.ones(1, 8, 128))
    assert sum(t.numel() * t.element_size() for t in stored) == kv(configs.LLAMA31_8B, dtype).bytes_per_layer_token


def test_a_window_caps_what_is_needed_not_what_is_stored() -> None:
    full, compact = kv(configs.MISTRAL_7B), kv(configs.MISTRAL_7B, layout="compact")
    assert full.bytes_per_request(32768) == 8 * compact.bytes_per_request(32768)
    assert compact.bytes_per_request(32768) == full.bytes_per_request(4096)
    assert full.bytes_read(32768) == full.bytes_per_request(4096)  # attention reads a window in either layout


def test_windows_of_some_layers() -> None:
    shape = read_model(configs.GEMMA2_9B).shape
    assert shape.window_counts == {4096: 21, None: 21}
    compact = KvStorage(shape, "fp16", "compact")
    assert compact.bytes_per_request(8192) == compact.bytes_per_layer_token * 21 * (8192 + 4096)


def test_latent_attention_expanded_and_compressed() -> None:
    assert kv(configs.DEEPSEEK_V3).bytes_per_token == 61 * 128 * (192 + 128) * 2
    # DeepSeek-V3 caches 576 numbers per layer: about 70 KB per token in bf16.
    assert kv(configs.DEEPSEEK_V3, "bf16", "compact").bytes_per_token == 61 * 576 * 2


@pytest.mark.parametrize(("start", "rows", "window"), [(0, 7, None), (5, 4, None), (0, 9, 4), (2, 5, 4), (8, 3, 4)])
def test_pairs_are_counted_row_by_row(start: int, rows: int, window: int | None) -> None:
    seen = [min(start + i + 1, window or 10**9) for i in range(rows)]
    assert _pairs(start, rows, window) == sum(seen)


@pytest.mark.parametrize("drafter", ["none", "eagle3", "self_int8", "medusa"])
def test_what_fits_is_the_edge(drafter: str) -> None:
    model, device = read_model(configs.LLAMA31_8B), find_device("l4")
    load = {"context": 8192, "dtype": "bf16", "drafter": drafter, "acceptance": 0.0}
    memory = make_plan(model, find_device("h100"), Workload(batch=2, **load)).memory  # type: ignore[arg-type]
    most = memory["max_batch"]
    at = [make_plan(model, find_device("h100"), Workload(batch=b, **load)).memory for b in (most, most + 1)]  # type: ignore[arg-type]
    assert [m["fits"] for m in at] == [True, False]
    longest = memory["max_context_tokens"]
    load.pop("context")
    at = [
        make_plan(model, find_device("h100"), Workload(batch=2, context=c, **load)).memory
        for c in (longest, longest + 1)
    ]  # type: ignore[arg-type]
    assert [m["fits"] for m in at] == [True, False]
    small = make_plan(model, device, Workload(batch=64, context=8192, dtype="bf16", drafter=drafter))
    assert not small.memory["fits"]
    assert small.memory["num_devices_by_memory"] * small.memory["usable_bytes"] >= small.memory["total_bytes"]
    assert any("such a device with enough memory" in text for text in small.assumptions)


def test_nothing_fits() -> None:
    memory = make_plan(read_model(configs.LLAMA2_70B), find_device("t4")).memory
    assert (memory["max_batch"], memory["max_context_tokens"], memory["fits"]) == (0, 0, False)


def test_drafters_take_their_memory() -> None:
    model, device = read_model(configs.LLAMA31_8B), find_device("h100")
    int8 = make_plan(model, device, Workload(drafter="self_int8")).memory
    assert int8["drafter_weight_bytes"] == model.weights.dense + model.weights.head
    assert int8["drafter_kv_bytes"] == 0
    eagle = make_plan(model, device, Workload(drafter="eagle3", context=1000, batch=3)).memory
    assert eagle["drafter_kv_bytes"] == 3 * 1000 * 2 * 8 * 128 * 2  # one layer
    # Fusing 3 x 4096^2, attention over 8192, feed-forward 3 x 4096 x 14336, 32,000 rows of output.
    layer = 3 * 4096**2 + 8192 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 32000 * 4096
    assert eagle["drafter_weight_bytes"] == pytest.approx(2 * layer, rel=1e-3)
