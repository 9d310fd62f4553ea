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
    machine = "1000.0 GB/s read and 10,000 GFLOP/s of square products in fp32, as measured in the same run on "
    assert machine in capsys.readouterr().out.replace("\n", "")
    result["provenance"]["argv"] = ["/x/plan_check.py", "repeats=1", "batches=[1, 2]", "output=/tmp/x.json"]
    command, rates, table = plan_check.markdown(result).split("\n\n")
    assert command == "```bash\npython -m specdec.eval.plan_check repeats=1 'batches=[1, 2]'\n```"
    assert rates.startswith(machine)
    assert rates.endswith(f" ({result['provenance']['num_threads']} threads):")
    page = table.splitlines()
    assert len(page) == 6
    assert all(line.count("|") == 10 for line in page)


def test_the_ttft_of_a_batch_is_that_of_packed_prompts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of 12 tokens fit into one forward, which reads the weights once."""
    slow = {"bandwidth_bytes_per_s": 1e6, "flops_per_s": {"fp32": 1e15}}
    device = Device(name="this", title="slow memory", memory_bytes=10**10, source="a test", measured=True, **slow)
    monkeypatch.setattr(plan_check, "this_device", lambda dtype: device)
    one, two = plan_check.measure(config(tiny, "drafters=[none]"))["rows"]
    assert one["ttft_floor_s"] < two["ttft_floor_s"] < 1.5 * one["ttft_floor_s"]


def test_acceptance_is_found_from_the_length() -> None:
    assert plan_check._acceptance(tokens_per_step(0.63, 4), 4) == pytest.approx(0.63)


def test_bad_settings(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="begin with none"):
        plan_check.measure(config(tiny, "drafters=[ngram]"))
    with pytest.raises(ConfigError, match="max_new_tokens=4"):
        plan_check.measure(config(tiny, "max_new_tokens=4"))
    for words in ("repeats=0", "batches=[]", "prompt_tokens=[128,0]"):
        with pytest.raises(ConfigError, match=words.partition("=")[0]):
            plan_check.measure(config(tiny, words))
