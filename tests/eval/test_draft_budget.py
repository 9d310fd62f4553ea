"""Drafting by batch size: the measurement runs on a tiny model and its table says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from specdec import ConfigError
from specdec.eval import draft_budget
from tests.tiny_chat_model import save_tiny_chat_model


def config(tiny: Path, *overrides: str) -> Any:
    small = ["drafters=[ngram,adversary]", "batch_sizes=[1,3]", "max_new_tokens=12", "rounds=2"]
    with initialize_config_module("specdec.configs", version_base="1.3"):
        overrides = (f"target.name={tiny}", "target.dtype=float64", "prompts.limit=2", *small, *overrides)
        return compose("draft_budget", list(overrides))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def test_end_to_end(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    result = json.loads(json.dumps(draft_budget.measure(config(tiny))))
    cells = [(r["drafter"], r["batch_size"], r["policy"]) for r in result["rows"]]
    assert cells == [(d, b, p) for d in ("ngram", "adversary") for b in (1, 3) for p in draft_budget.POLICIES]
    for row in result["rows"]:
        assert row["num_equal"] == row["batch_size"]
        assert len(row["ratio"]["per_unit"]) == len(row["seconds"]) == 2
    wrong = {r["policy"]: r for r in result["rows"] if r["drafter"] == "adversary" and r["batch_size"] == 3}
    assert wrong["static"]["acceptance_rate"] == 0
    assert wrong["cost_aware"]["drafts_per_step"] < wrong["static"]["drafts_per_step"]
    draft_budget.show(result)
    assert draft_budget.markdown(result).count("| adversary |") == 4


def test_nothing_to_run_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="rounds=0"):
        draft_budget.measure(config(tiny, "rounds=0"))
