"""`specdec check`: what it prints, and its exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.running import as_json, refused, run


@pytest.fixture
def recurrent(tmp_path: Path) -> str:
    from transformers import MambaConfig

    MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    return str(tmp_path / "mamba")


@pytest.fixture
def other_tokens(tmp_path: Path, model: str) -> str:
    """The same model with two tokens exchanged."""
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    return str(folder)


def test_a_model_that_runs(model: str) -> None:
    result = run("check", model)
    assert result.exit_code == 0, result.output
    assert "runs, with chains and trees of draft tokens" in result.stdout
    for word in ("LlamaForCausalLM", "kv_bytes_per_token", "4,096", "self_int8", "can run"):
        assert word in result.stdout
    assert (
        max(map(len, result.stdout.splitlines()[1:])) <= 80
    )  # the table; the first line is the model's path and verdict


def test_json_is_the_report(model: str) -> None:
    from specdec.check import check

    found = as_json(run("check", model, "--json"))
    assert found == json.loads(json.dumps(check(model).to_dict()))
    assert found["verdict"] == "trees"


def test_weights(model: str) -> None:
    found = as_json(run("check", model, "--weights", "--dtype", "float64", "--json"))
    assert found["weights"]["error"] <= found["weights"]["tolerance"]
    assert found["dtype"] == "float64"
    assert "its weights: in float32" in " ".join(run("check", model, "--weights").stdout.split())


def test_a_model_that_is_refused(recurrent: str) -> None:
    result = run("check", recurrent)
    assert result.exit_code == 1, result.output
    assert "does not run" in result.stdout
    assert "why: " in result.stdout
    assert "Traceback" not in result.output
    found = run("check", recurrent, "--json")
    assert (found.exit_code, json.loads(found.stdout)["verdict"]) == (1, "refused")


def test_pair(model: str, other_tokens: str) -> None:
    fits = run("check", model, "--draft", model)
    assert fits.exit_code == 0, fits.output
    assert "fits as draft model" in " ".join(fits.stdout.split())
    mapped = run("check", model, "--draft", other_tokens)
    assert mapped.exit_code == 0, mapped.output
    assert "another vocabulary: they share 258 tokens, 100.0% of the target's" in " ".join(mapped.stdout.split())
    file = Path(other_tokens) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    names = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {name if i == 0 else f"x{i}x": i for name, i in names.items()}
    file.write_text(json.dumps(tokenizer))
    result = run("check", model, "--draft", other_tokens)
    assert result.exit_code == 1
    assert "does not fit as draft model" in " ".join(result.stdout.split())
    found = run("check", model, "--draft", other_tokens, "--json")
    assert (found.exit_code, json.loads(found.stdout)["pair"]["fits"]) == (1, False)


def test_a_trained_drafter_is_no_draft_model(model: str) -> None:
    result = run("check", model, "--draft", "smollm2-eagle3")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 1, result.output
    assert "smollm2-eagle3: does not fit as drafter (eagle3)" in text
    assert "it was trained for smollm2 (hidden size 576, 49152 tokens)" in text
    assert "--drafter smollm2-eagle3" in text


def test_bad_input(model: str) -> None:
    assert "did you mean 'smollm2'?" in refused(run("check", "smolm2"))
    assert "no file or directory" in refused(run("check", model, "--draft", "/nowhere/at/all"))
    assert "unknown dtype" in refused(run("check", model, "--dtype", "f"))
    assert run("check").exit_code == 2
