"""The table of predicted and measured times: end to end on a tiny model and a made-up device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from specdec import ConfigError
from specdec.eval import plan_check
from specdec.planner import Device
from specdec.planner.speculation import tokens_per_step
from tests.tiny_chat_model import save_tiny_chat_model


def config(tiny: Path, *overrides: str) -> Any:
    small = ("batches=[1,2]", "prompt_tokens=[12]", "drafters=[none,ngram]", "max_new_tokens=12", "repeats=1")
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose("plan_check", [f"target.name={tiny}", "target.dtype=float32", *small, *overrides])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def test_table(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = Device(
        name="this",
        title="a made-up machine",
        memory_bytes=10**10,
        bandwidth_bytes_per_s=1e12,
        flops_per_s={"fp32": 1e13},
        source="a test",
        measured=True,
    )
    monkeypatch.setattr(plan_check, "this_device", lambda dtype: device)
    result = plan_check.measure(config(tiny))
    assert [(row["drafter"], row["batch"]) for row in result["rows"]] == [
        ("none", 1),
        ("ngram", 1),
        ("none", 2),
        ("ngram", 2),
    ]
    for row in result["rows"]:
        assert 0 < row["ttft_floor_s"] < row["ttft_s"]
        assert 0 < row["tpot_floor_s"] < row["tpot_s"]
        assert row["speedup"] == (1 if row["drafter"] == "none" else pytest.approx(row["speedup"]))
        assert row["acceptance_length"] >= 1
    plan_check.show(result)
    assert "1000.0 GB/s read, 10000 GFLOP/s" in capsys.readouterr().out
    page = plan_check.markdown(result).splitlines()
    assert len(page) == 6
    assert all(line.count("|") == 10 for line in page)


def test_acceptance_is_found_from_the_length() -> None:
    assert plan_check._acceptance(tokens_per_step(0.63, 4), 4) == pytest.approx(0.63)


def test_bad_settings(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="begin with none"):
        plan_check.measure(config(tiny, "drafters=[ngram]"))
    with pytest.raises(ConfigError, match="max_new_tokens=4"):
        plan_check.measure(config(tiny, "max_new_tokens=4"))
