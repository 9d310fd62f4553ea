"""Chunked prefill, batching and prefix hits: arithmetic by hand, then on a tiny model that everything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from specdec import ConfigError, Engine
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


@pytest.mark.parametrize("plenty", [5, 20])  # it ends before the long prompt comes, or while it is prefilled
def test_running_requests_that_end_leave_no_gap(tiny: Path, plenty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_prefill, "_PLENTY", plenty)
    words = ["prompt_tokens=80", "chunk_tokens=[4,2]", "num_running=1", "repeats=1"]
    with pytest.raises(ConfigError, match=rf"ended after {plenty} tokens \(length\)"):
        chunked_prefill.measure(config("chunked_prefill", tiny, *words))


def prefix_config(tiny: Path, *words: str) -> Any:
    return config("prefix", tiny, "prefix_tokens=40", "max_new_tokens=8", "repeats=1", "drafter=ngram", *words)


def test_prefix_end_to_end(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(json.dumps(prefix.measure(prefix_config(tiny))))
    for pair in found["pairs"]:
        assert [pair[kind]["num_cached_tokens"] for kind in ("cold", "warm", "uncached")] == [0, 32, 0]
        assert pair["warm"]["token_ids"] == pair["uncached"]["token_ids"] != pair["cold"]["token_ids"]
        assert pair["warm"]["num_steps"] == pair["uncached"]["num_steps"]
    assert (found["identity"]["equal"], found["identity"]["of"]) == (1, 1)
    assert prefix.show(found)
    assert "verdict: good" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="at least 1 each"):
        prefix.measure(config("prefix", tiny, "prefix_tokens=0"))


def test_a_hit_that_changes_answers_is_not_good(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(engine: Engine, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        found = real(engine, prompt, max_new_tokens)
        if found["num_cached_tokens"]:
            found["token_ids"][3] ^= 1
        return found

    real = prefix.ask
    monkeypatch.setattr(prefix, "ask", ask)
    found = prefix.measure(prefix_config(tiny))
    assert found["identity"]["parted"][0]["position"] == 3
    assert not prefix.show(found)


def test_prompts_too_short_to_hit_are_not_good(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not prefix.show(prefix.measure(prefix_config(tiny, "prefix_tokens=5")))
    assert "was not found" in capsys.readouterr().out


def test_acceptance_that_falls_behind_a_hit() -> None:
    def run(num_steps: int, ids: Sequence[int] = (1, 2)) -> dict[str, Any]:
        return {"num_steps": num_steps, "num_emitted_tokens": 100, "token_ids": list(ids), "num_cached_tokens": 16}

    def falls(*warm: dict[str, Any]) -> bool:
        pairs = [{"cold": run(7), "warm": w, "uncached": run(50)} for w in warm]
        return bool(prefix.compare(pairs)["acceptance_falls"])

    assert not falls(run(50)) and not falls(run(52)) and not falls(run(40))
    assert falls(run(53)) and falls(run(50), run(60))
    assert not falls(run(50), run(90, ids=(1, 3)))  # another text


def batching_config(tiny: Path, *words: str) -> Any:
    small = ("num_requests=3", "max_new_tokens=6", "repeats=1", "peer.num_blocks=32", "peer.max_batch_tokens=256")
    return config("batching", tiny, *small, *words)


def test_batching_end_to_end(tiny: Path) -> None:
    found = json.loads(json.dumps(batching.measure(batching_config(tiny))))
    assert {"together", "one by one"} <= set(found["tokens_per_s"])
    assert set(found["tokens_per_s"]) | set(found["excuses"]) == {"together", "one by one", "generate_batch"}
    for same in found["identity"].values():
        assert (same["equal"], same["of"]) == (3, 3)
    assert batching.show(found)
    differ, near_tie = ({"equal": 2, "of": 3, "parted": [{"is_near_tie": is_tie}]} for is_tie in (False, True))
    for name, identity, good in (
        ("generate_batch", differ, True),  # not ours to answer for
        ("together", near_tie, True),
        ("together", differ, False),
    ):
        assert batching.show({**found, "identity": {**found["identity"], name: identity}}) is good


def test_batching_counts_no_tokens_that_never_came(tiny: Path, tmp_path: Path) -> None:
    short = Path(shutil.copytree(tiny, tmp_path / "short"))
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 64}))
    words = ["transformers=false", f"prompts.texts=[{'a' * 40}]", "prompts.chat=false", "max_new_tokens=40"]
    with pytest.raises(ConfigError, match=r"answers have \[24\] tokens.*lower max_new_tokens"):
        batching.measure(batching_config(short, *words))


def test_a_peer_that_does_not_run_is_excused(tiny: Path) -> None:
    words = ["num_requests=2", "max_new_tokens=2", "repeats=1", "+peer.no_such_option=1"]
    found = batching.measure(config("batching", tiny, *words))
    assert "no_such_option" in found["excuses"]["generate_batch"]
    assert set(found["tokens_per_s"]) == {"together", "one by one"}
    batching.show(found)
