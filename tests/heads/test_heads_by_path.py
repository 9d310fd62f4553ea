"""A head's folder, hub id or shipped name in the place of a drafter's name, through every door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import specdec
from specdec import LLM
from specdec.errors import CheckpointError, ConfigError, IncompatibleDrafterError
from specdec.heads import checkpoint, shipped_heads
from specdec.heads.saving import save_head
from specdec.heads.target import head_target
from specdec.models.build import runner_for
from tests.cli.running import as_json, generate
from tests.decoding import one, prompts, reference
from tests.heads.tiny_heads import tiny_eagle, tiny_medusa
from tests.models.architectures import build, model_of, named
from tests.tiny_chat_model import save_tiny_chat_model

KINDS = {"eagle3": (tiny_eagle, {}), "eagle": (tiny_eagle, {"generation": 1}), "medusa": (tiny_medusa, {})}
NEW = 8


def save(folder: Path, model: Any, kind: str) -> Path:
    """Write a random head of a kind for a model."""
    make, options = KINDS[kind]
    runner = runner_for(model)
    head = make(runner, **options)
    return save_head(folder, head.module, head.vocabulary, head_target(runner), settings={}, dtype=torch.float32)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(named("qwen3"))  # grouped queries, and heads that are wider than hidden size / heads


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of shipped heads."""
    monkeypatch.setattr(shipped_heads, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "shipped"


@pytest.mark.parametrize("kind", KINDS)
def test_path_hub_id_and_shipped_name(
    kind: str, model: Any, tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "head", model, kind)
    save(shipped / f"tiny-{kind}", model, kind)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, allow_patterns: str(folder))
    prompt = prompts(5)[0]
    expected = reference(model, prompt, NEW)
    for source in (str(folder), f"someone/{kind}", f"tiny-{kind}"):
        llm = LLM(model, drafter=source)
        assert llm.engine.drafter.name == kind
        assert llm.generate(prompt, max_new_tokens=NEW, ignore_eos=True)[0].token_ids == expected
    assert LLM(model, drafter=kind).engine.drafter.name == kind  # the shipped one
    options = {"max_new_tokens": NEW, "do_sample": False}
    found, stats = specdec.generate(model, one(prompt), drafter=str(folder), return_stats=True, **options)
    assert found[0].tolist() == [*prompt, *expected]
    assert stats[0].num_draft_tokens > 0
    found = model.generate(one(prompt), custom_generate=specdec.custom_generate, drafter=str(folder), **options)
    assert found[0].tolist() == [*prompt, *expected]
    checkpoint._downloaded.cache_clear()


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    target = str(save_tiny_chat_model(tmp_path / "target"))
    folder = save(tmp_path / "head", LLM(target).model, "medusa")
    found = as_json(generate(target, "--drafter", str(folder), "--json"))
    assert found["drafter"] == "medusa"
    assert found["token_ids"] == as_json(generate(target, "--json"))["token_ids"]


def test_what_is_no_head_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no weights of a head"):
        LLM("no/model", drafter=str(tmp_path))
    with pytest.raises(CheckpointError, match="there is no folder"):
        LLM("no/model", drafter=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="did you mean 'eagle3'"):
        LLM("no/model", drafter="eagle33")
    assert LLM(model_of(named("llama")), drafter="specdec.drafters.none:NoneDrafter").engine.drafter.name == "none"


def test_a_registered_name_is_no_folder_of_that_name(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ngram").mkdir()
    assert LLM(model, drafter="ngram").engine.drafter.name == "ngram"


def test_shipped_for_the_target_it_was_trained_for(model: Any, shipped: Path) -> None:
    stranger = build(named("qwen3"), seed=1)
    target, other = head_target(runner_for(model)), head_target(runner_for(stranger))
    assert shipped_heads.shipped_for("eagle3", target) is None
    for kind in KINDS:
        save(shipped / f"tiny-{kind}", model, kind)
    (shipped / "README.md").touch()
    assert shipped_heads.shipped_names() == ["tiny-eagle", "tiny-eagle3", "tiny-medusa"]
    assert {kind: shipped_heads.shipped_for(kind, target) for kind in KINDS} == {kind: f"tiny-{kind}" for kind in KINDS}
    assert [shipped_heads.shipped_for(kind, other) for kind in KINDS] == [None] * 3
    with pytest.raises(
        IncompatibleDrafterError, match=r"no eagle3 head ships for .*kind ship: tiny-eagle3\)\. Give one"
    ):
        LLM(stranger, drafter="eagle3")
    with pytest.raises(IncompatibleDrafterError, match=r"tiny-eagle3 \(specdec\): the head was trained for"):
        LLM(stranger, drafter="tiny-eagle3")


def test_what_ships_is_whole() -> None:
    for name in shipped_heads.shipped_names():
        folder = shipped_heads.shipped_folder(name)
        config = json.loads((folder / "config.json").read_text())
        assert config["format"] == "specdec-head"
        assert (folder / "README.md").stat().st_size > 500, "a card: how trained, on what, held-out acceptance"
        assert (folder / "model.safetensors").stat().st_size <= 16_000_000


def test_a_head_that_was_written_anew_is_read_anew(model: Any, tmp_path: Path) -> None:
    runner = runner_for(model)
    said = []
    for seed in (0, 1):
        head = tiny_eagle(runner, seed=seed)
        save_head(tmp_path / "head", head.module, head.vocabulary, head_target(runner), dtype=torch.float32)
        drafter: Any = LLM(model, drafter=str(tmp_path / "head")).engine.drafter
        said.append(drafter._module.fc.weight.clone())
    assert not torch.equal(*said)


@pytest.mark.parametrize("drafted", [None, range(0, 64, 2)], ids=["all tokens", "half of them"])
def test_weight_bytes_are_those_beside_the_target(model: Any, drafted: Any) -> None:
    head = tiny_eagle(runner_for(model), drafted=drafted)
    drafter: Any = LLM(model, drafter="eagle3", drafter_options={"model": head}).engine.drafter
    own = sum(p.numel() * p.element_size() for p in head.module.parameters())
    copied = 0 if drafted is None else 32 * head.module.config.hidden_size * own_size(head)
    assert drafter.weight_bytes == own + copied


def own_size(head: Any) -> int:
    """Return the bytes of one weight."""
    return int(next(head.module.parameters()).element_size())
