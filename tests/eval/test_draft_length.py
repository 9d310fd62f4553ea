"""The draft-length measurement runs on a tiny model and its tables say what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from specdec import ConfigError
from specdec.eval import draft_length
from specdec.eval.draft_length_tables import markdown, show, verdict
from tests.tiny_chat_model import save_tiny_chat_model


def config(tiny: Path, *overrides: str) -> Any:
    small = ["drafters=[random]", "rates=[0.0,1.0]", "batch_sizes=[1,2]", "max_new_tokens=12", "rounds=2"]
    few = ["hopeless_tokens=40", "hopeless_repeats=1", "real=[ngram,adversary]", "real_tokens=16", "real_prompts=2"]
    with initialize_config_module("specdec.configs", version_base="1.3"):
        overrides = (f"target.name={tiny}", "target.dtype=float64", "prompts.limit=3", *small, *few, *overrides)
        return compose("draft_length", list(overrides))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def result(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        return draft_length.measure(config(tiny))


def test_end_to_end(result: dict[str, Any]) -> None:
    cells = [(c["drafter"], c["batch_size"], c["rate"]) for c in result["sweep"]]
    assert cells == [("random", b, r) for b in (1, 2) for r in (0.0, 1.0)]
    assert all(len(c["cost_aware"]["per_unit"]) == 2 for c in result["sweep"])
    assert [r["drafter"] for r in result["hopeless"]] == ["adversary", "random"]
    assert all(r["last_drafted_at"] <= 32 and r["num_accepted"] == 0 for r in result["hopeless"])
    assert [(r["drafter"], r["policy"]) for r in result["real"]] == [
        (d, p) for d in ("ngram", "adversary") for p in ("static", "cost_aware")
    ]
    assert all(r["identical"] == r["of"] == 2 for r in result["real"])
    assert result["step_times"]["rows"][0] == 1


def test_tables(result: dict[str, Any]) -> None:
    result = json.loads(json.dumps(result))
    show(result, Console(quiet=True))
    text = markdown(result)
    assert text.count("\n| random |") == 5
    assert "LOSSY" in text
    assert "of 4 cells lie below 0.98" in text


def test_a_loss_is_named(result: dict[str, Any]) -> None:
    result = json.loads(json.dumps(result))
    for cell in result["sweep"]:
        cell["cost_aware"] |= {"median": 1.1, "per_unit": {"0": 1.0, "1": 1.2}}
    assert verdict(result).startswith("0 of 4")
    result["sweep"][3]["cost_aware"] |= {"median": 0.9, "per_unit": {"0": 0.85, "1": 0.95}}
    assert "1 of 4 cells lie below 0.98 in every round: random batch 2 rate 1;" in verdict(result)


def test_too_few_rounds_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="rounds=0"):
        draft_length.measure(config(tiny, "rounds=0"))
