"""`check` and `check_pair` about trained drafters: whose one is, from names, sizes and the weights at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from specdec.check import check, check_pair
from specdec.check.trained import is_target, shipped_drafter
from specdec.heads import shipped_heads
from specdec.heads.saving import described
from specdec.heads.target import head_target
from specdec.models.build import runner_for
from specdec.models.described import Described
from specdec.models.loading import Source
from tests.models.architectures import build, named


@pytest.fixture
def model() -> Any:
    return build(named("llama"), torch.float32)


@pytest.fixture
def shipped(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ship Medusa heads for the tiny model: what `check` reads of them."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "shipped" / "tiny-medusa"
    folder.mkdir(parents=True)
    config = described("medusa", {}, head_target(runner_for(model)), None)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(shipped_heads, "SHIPPED", folder.parent)
    return folder


def test_the_targets_weights_decide(model: Any, shipped: Path, tmp_path: Path) -> None:
    def found_for(target: Any) -> tuple[dict[str, str], str | None, str]:
        report = check(target, weights=False)
        return report.shipped, report.drafters["medusa"], " ".join(report.notes)

    (tmp_path / "saved").mkdir()
    model.save_pretrained(tmp_path / "saved")
    for target in (model, tmp_path / "saved"):
        assert found_for(target)[:2] == ({"medusa": "tiny-medusa"}, None)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    names, reason, _ = found_for(model)
    assert names == {}
    assert f"hidden size {model.config.hidden_size}, {model.config.vocab_size} tokens" in str(reason)
    model.config.save_pretrained(tmp_path / "config_only")
    names, reason, notes = found_for(tmp_path / "config_only")
    assert (names, reason) == ({"medusa": "tiny-medusa"}, None)
    assert "tiny-medusa is for" in notes
    assert "shows when its weights are loaded" in notes


def test_the_sizes_said_are_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    config = named("llama")
    report = check(LlamaConfig(**{**config.options, "hidden_size": 320, "vocab_size": 5000}))
    for name in ("eagle", "eagle3", "medusa"):
        assert f"no {name} head ships for llama (hidden size 320, 5000 tokens" in str(report.drafters[name])


def test_a_built_in_model_is_known_by_its_names() -> None:
    config = LlamaConfig(vocab_size=49152, hidden_size=576)
    for name, fits in (
        ("smollm2", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("HuggingFaceTB/SmolLM2-135M", None),
    ):
        found = Described(name, "LlamaForCausalLM", config, source=Source(name, name, None))
        for kind in ("eagle3", "medusa", "draft_model"):
            ship = shipped_drafter(kind, found)
            assert ship.name == f"smollm2-{kind}"
            assert bool(ship.note) is (fits is None)
        assert is_target(found, shipped_heads.shipped_config("smollm2-eagle3")["target"]) is fits


def test_a_pair_with_a_trained_drafter(model: Any, shipped: Path) -> None:
    for draft in ("tiny-medusa", str(shipped)):
        report = check_pair(model, draft)
        assert (report.fits, report.drafter, report.reason) == (True, "medusa", None)
        assert f"--drafter {draft}" in report.warnings[0]
    report = check_pair(build(named("gemma")), "tiny-medusa")
    assert not report.fits
    assert "is another model" in str(report.reason)
