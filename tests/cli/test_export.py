"""`specdec export`: what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.running import as_json, refused, run


@pytest.fixture(scope="module")
def head(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random head of the tiny model in specdec's own layout, drafting its first 20 tokens."""
    from specdec.heads.draft_vocabulary import DraftVocabulary
    from specdec.heads.eagle import EagleConfig, EagleHead
    from specdec.heads.saving import save_head
    from specdec.heads.target import head_target
    from specdec.models.build import runner_for
    from specdec.models.loading import load_model

    target = head_target(runner_for(load_model(model)[0]))
    config = EagleConfig(
        generation=3, hidden_size=target.hidden_size, target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size, draft_vocab_size=20, num_heads=2, num_kv_heads=1, head_dim=8,
        intermediate_size=16, feature_layers=(0, 1),
    )  # fmt: skip
    vocabulary = DraftVocabulary(torch.arange(20), target.vocab_size)
    return str(save_head(tmp_path_factory.mktemp("heads") / "head", EagleHead(config), vocabulary, target))


def test_speculators(model: str, head: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("export", head, "--to", "speculators", "--out", str(out), "--target-name", "an/id")
    assert result.exit_code == 0, result.output
    assert f"{head} written to {out}; to serve it:" in result.stdout
    command = next(line for line in result.stdout.splitlines() if line.startswith("vllm serve an/id "))
    assert json.loads(command.split("'")[1]) == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    assert "sglang" not in result.stdout
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "an/id"
    assert load_file(out / "model.safetensors")["lm_head.weight"].dtype == torch.float16


def test_sglang_as_json_from_an_export(model: str, head: str, tmp_path: Path) -> None:
    """The target is the one that the head's config names."""
    first, out = tmp_path / "first", tmp_path / "out"
    assert run("export", head, "--to", "speculators", "--out", str(first), "--dtype", "fp32").exit_code == 0
    options = ("--dtype", "fp32", "--num-draft-tokens", "5", "--json")
    found = as_json(run("export", str(first), "--to", "sglang", "--out", str(out), *options))
    assert (found["folder"], found["layout"], found["target"]) == (str(out), "sglang", model)
    assert list(found["commands"]) == ["SGLang", "vLLM"]
    assert f"--model-path {model} --speculative-algorithm EAGLE3" in found["commands"]["SGLang"]
    assert "--speculative-num-steps 5" in found["commands"]["SGLang"]
    theirs, ours = load_file(first / "model.safetensors"), load_file(out / "model.safetensors")
    assert torch.equal(ours["midlayer.mlp.up_proj.weight"], theirs["layers.0.mlp.up_proj.weight"])


def test_what_is_refused(model: str, head: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert "unknown layout 'vllm'" in refused(run("export", head, "--to", "vllm", "--out", out))
    assert "--dtype auto" in refused(run("export", head, "--to", "sglang", "--out", out, "--dtype", "auto"))
    assert "there is no folder nothing" in refused(run("export", "nothing", "--to", "sglang", "--out", out))
    distilled = refused(run("export", "smollm2-draft_model", "--to", "sglang", "--out", out))
    assert "a distilled draft model" in distilled
    last = run("export", head, "--target", model, "--to", "sglang", "--out", f"{head}/config.json")
    assert "config.json is a file" in refused(last)
    assert not Path(out).exists()


def test_a_head_that_names_no_target_needs_one(head: str, model: str, tmp_path: Path) -> None:
    first, out = tmp_path / "first", str(tmp_path / "out")
    assert run("export", head, "--to", "sglang", "--out", str(first)).exit_code == 0
    assert "--target is needed" in refused(run("export", str(first), "--to", "speculators", "--out", out))
    assert run("export", str(first), "--to", "speculators", "--out", out, "--target", model).exit_code == 0


def test_what_the_built_in_model_is_served_as() -> None:
    from specdec.cli.export import _served_name

    assert _served_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert _served_name("owner/name") == "owner/name"
