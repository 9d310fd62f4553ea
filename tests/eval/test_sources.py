"""A point is of the files that its config names, too: with others under the same names it is refused, not mixed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaForCausalLM

from specdec import ConfigError
from specdec.eval import point, sources
from specdec.eval.point import measure_point
from specdec.eval.sources import digest_of, digests
from specdec.eval.target import load_target
from tests.eval.known_model import config_for, save_known_model
from tests.eval.test_point import SMALL, Killed, stop_after
from tests.tiny_chat_model import save_tiny_chat_model


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


def train(folder: Path) -> None:
    """Write other weights into a model's folder; the files are as long as they were."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(folder)


def measure(config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int | None) -> None:
    with monkeypatch.context() as patch:
        if stop_at is None:
            measure_point(config, folder)
            return
        stop_after(patch, stop_at, Killed())
        with pytest.raises(Killed):
            measure_point(config, folder)


@pytest.mark.parametrize("stop_at", [None, 6])  # finished, and killed in the second repeat
def test_a_drafter_that_was_trained_again_is_another_one(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int | None
) -> None:
    draft, folder = save_tiny_chat_model(tmp_path / "draft"), tmp_path / "point"
    config = config_for("acceptance", known, *SMALL, "drafter=draft_model", f"drafter.options.model={draft}")
    measure(config, folder, monkeypatch, stop_at)
    before = (folder / "records.jsonl").read_bytes()
    kept = shutil.copytree(draft, tmp_path / "kept")
    train(draft)
    with monkeypatch.context() as patch:
        patch.setattr(point, "load_target", lambda *_: pytest.fail("loaded, only to be refused"))
        with pytest.raises(ConfigError, match=f"measured with another {draft}, whose content has changed since; del"):
            measure_point(config, folder)
    assert "whose content has changed" in json.loads((folder / "error.json").read_text())["message"]
    assert (folder / "records.jsonl").read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    shutil.rmtree(draft)
    shutil.copytree(kept, draft)
    assert measure_point(config, folder).end is not None
    assert not (folder / "error.json").exists()


def test_prompts_that_were_edited_are_others_for_a_finished_point_too(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "aA"}\n{"prompt": "bB"}')
    config = config_for("acceptance", known, *SMALL, f"prompts.path={rows}")
    measure_point(config, tmp_path / "point")
    rows.write_text('{"prompt": "aA"}\n{"prompt": "bC"}')
    monkeypatch.setattr(point, "load_target", lambda *_: pytest.fail("loaded, only to be refused"))
    with pytest.raises(ConfigError, match=r"another .*rows\.jsonl, whose content has changed"):
        measure_point(config, tmp_path / "point")
    rows.unlink()  # of what is gone nobody can tell, and the figures are what they were
    assert measure_point(config, tmp_path / "point").end is not None


def test_a_target_under_the_same_name_is_another_one(known: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(known, tmp_path / "target"))
    config = config_for("acceptance", target, *SMALL)
    measure_point(config, tmp_path / "point")
    first = load_target(config).model
    assert load_target(config).model is first
    train(target)
    assert load_target(config).model is not first
    with pytest.raises(ConfigError, match=f"another {target}, whose"):
        measure_point(config, tmp_path / "point")
    assert measure_point(config, tmp_path / "other").end is not None


def test_points_of_earlier_releases_are_what_they_were(known: Path, tmp_path: Path) -> None:
    config = config_for("acceptance", known, *SMALL)
    measure_point(config, tmp_path)
    path = tmp_path / "records.jsonl"
    header, *rest = path.read_text().splitlines()
    told = json.loads(header)
    assert set(told.pop("sources")) == {str(known), f"{known}/prompts.jsonl"}
    path.write_text("\n".join([json.dumps(told), *rest]) + "\n")
    assert measure_point(config, tmp_path).end is not None


def config_of(**changes: Any) -> Any:
    nothing = {"name": "none", "options": {}}
    usual = {"target": {"name": "smollm3"}, "drafter": nothing, "verifier": nothing, "prompts": {"path": None}}
    return OmegaConf.create({**usual, "beside": {}, "peer_options": {}, **changes})


def test_what_may_name_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["ngram", "model", "target", "heads/a", "heads/b", "heads/c", "heads/d", "draft"]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "file.gguf").write_text("GGUF")
    (tmp_path / "rows").mkdir()
    found = digests(
        config_of(
            target={"name": "target"},
            drafter={"name": "heads/a", "options": {"model": "./draft", "tree": {"shape": "dynamic"}}},
            beside={
                "ngram": {},  # the registered drafter, not the folder
                "heads/b": None,
                "mine": {"drafter": "heads/c"},
                "other": {"drafter": "eagle3", "drafter_options": {"model": "heads/d"}},
                "hub": {"drafter": "owner/name"},
            },
            peer_options={"openvino_draft_model": {"draft_model": "file.gguf"}},
            prompts={"path": "rows"},
        )
    )
    assert set(found) == {"target", "heads/a", "./draft", "heads/b", "heads/c", "heads/d", "file.gguf"}


@pytest.mark.parametrize("name", ["", "~nobody/x", "a" * 5000, "a\0b", "openai/gsm8k"])
def test_what_names_no_file_has_no_digest(name: str) -> None:
    assert digest_of(name) is None
    assert digests(config_of(target={"name": name}, prompts={"path": name})) == {}


def test_a_digest_is_of_what_is_read(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("1")
    first = digest_of(str(tmp_path))
    for name in ("README.md", "curve.png", ".lock", "summary.json"):  # for people, and of a point in the same folder
        (tmp_path / name).write_text("2")
    (tmp_path / "point").mkdir()
    os.utime(tmp_path / "model.safetensors", (0, 0))
    assert digest_of(str(tmp_path)) == first is not None
    (tmp_path / "model.safetensors").write_text("2")
    assert digest_of(str(tmp_path)) != first


@pytest.mark.parametrize("path", ["rows", "rows/*.jsonl", "rows/a.jsonl"])
def test_prompts_are_files_patterns_and_folders(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").mkdir()
    monkeypatch.chdir(tmp_path)
    seen = set()
    for text in ("one", "two"):
        (tmp_path / "rows" / "a.jsonl").write_text(text)
        seen.add(digests(config_of(prompts={"path": path}))[path])
    assert len(seen) == 2


def test_long_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PIECE", 10)
    monkeypatch.setattr(sources, "_PIECES", 3)
    file = tmp_path / "a.gguf"

    def mark(content: bytes) -> str | None:
        file.write_bytes(content)
        return digest_of(str(file))

    short = bytes(25)
    assert len({mark(short[:i] + b"x" + short[i + 1 :]) for i in range(25)} | {mark(short)}) == 26, "all of it counts"
    long = bytes(100)
    assert len({mark(long), mark(long + b"\0"), mark(b"x" + long[1:]), mark(long[:-1] + b"x")}) == 4
