"""Chunked prefill, batching and prefix hits: arithmetic by hand, then on a tiny model that everything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from specdec import ConfigError
from specdec.eval import batching, chunked_prefill, prefix
from specdec.eval.prompts import long_prompt
from tests.tiny_chat_model import save_tiny_chat_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))


def config(name: str, tiny: Path, *words: str) -> Any:
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose(name, ["target=path", f"target.name={tiny}", "target.dtype=float64", *words])


def test_a_long_prompt_is_made_of_the_others() -> None:
    assert long_prompt([[1, 2], [3]], 5) == [1, 2, 3, 1, 2]
    assert long_prompt([[1, 2], [3]], 4, first=1) == [3, 1, 2, 3]


def test_chunk_sizes_are_compared_with_the_first() -> None:
    found = chunked_prefill.compare(
        {2048: [(4.0, 2.0), (4.0, 2.0), (9.0, 9.0)], 512: [(1.0, 2.2)] * 3, 64: [(0.5, 2.5)] * 3, 256: [(2.0, 2.0)]}
    )
    assert [(r["gap_cut"], round(r["ttft_cost"], 3)) for r in found["rows"]] == [(1, 0), (4, 0.1), (8, 0.25), (2, 0)]
    assert found["worth_it"] == [512]


def test_rates_and_ratios_of_batching() -> None:
    found = batching.compare({"together": [1.0, 2.0, 1.0], "one by one": [4.0, 4.0, 5.0]}, 100)
    assert found["tokens_per_s"] == {"together": 100.0, "one by one": 25.0}
    assert found["speedup_over"] == {"one by one": 4.0}


def test_chunked_prefill_end_to_end(tiny: Path) -> None:
    words = ["prompt_tokens=80", "chunk_tokens=[128,32]", "num_running=2", "repeats=1"]
    found = json.loads(json.dumps(chunked_prefill.measure(config("chunked_prefill", tiny, *words))))
    assert [row["chunk_tokens"] for row in found["rows"]] == [128, 32]
    assert all(row["longest_gap_s"] > 0 and row["ttft_s"] > 0 for row in found["rows"])
    chunked_prefill.show(found)
    with pytest.raises(ConfigError, match="two different sizes"):
        chunked_prefill.measure(config("chunked_prefill", tiny, "chunk_tokens=[64]"))


def test_prefix_end_to_end(tiny: Path) -> None:
    words = ["prefix_tokens=40", "max_new_tokens=8", "repeats=1", "drafter=ngram"]
    found = json.loads(json.dumps(prefix.measure(config("prefix", tiny, *words))))
    for pair in found["pairs"]:
        assert (pair["cold"]["num_cached_tokens"], pair["warm"]["num_cached_tokens"]) == (0, 32)
    prefix.show(found)
    with pytest.raises(ConfigError, match="at least 1 each"):
        prefix.measure(config("prefix", tiny, "prefix_tokens=0"))


def test_batching_end_to_end(tiny: Path) -> None:
    words = ["num_requests=3", "max_new_tokens=6", "repeats=1", "peer.num_blocks=32", "peer.max_batch_tokens=256"]
    found = json.loads(json.dumps(batching.measure(config("batching", tiny, *words))))
    assert {"together", "one by one"} <= set(found["tokens_per_s"])
    assert set(found["tokens_per_s"]) | set(found["excuses"]) == {"together", "one by one", "generate_batch"}
    for same in found["identity"].values():
        assert (same["equal"], same["of"]) == (3, 3)
    batching.show(found)


def test_a_peer_that_does_not_run_is_excused(tiny: Path) -> None:
    words = ["num_requests=2", "max_new_tokens=2", "repeats=1", "+peer.no_such_option=1"]
    found = batching.measure(config("batching", tiny, *words))
    assert "no_such_option" in found["excuses"]["generate_batch"]
    assert set(found["tokens_per_s"]) == {"together", "one by one"}
    batching.show(found)
