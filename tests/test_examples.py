"""Every script of docs/examples runs, offline, from any folder, and shows something; each asserts what it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_chat_model import save_tiny_chat_model

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "docs" / "examples"
NEEDS = {"grammar.py": "outlines_core"}  # packages beyond specdec's own
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory with a model that says printable ASCII only, so that every example can show its point."""
    folder = save_tiny_chat_model(tmp_path_factory.mktemp("examples") / "tiny")
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    unprintable = sorted(
        i for token, i in vocabulary.items() if len(token) > 1 or not (token.isascii() or token == "Ġ")
    )
    path = folder / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"suppress_tokens": unprintable}), encoding="utf-8")
    return str(folder)


def run(name: str, folder: Path, *arguments: str, **environment: str) -> str:
    """Run an example in `folder` and return what it printed."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs {NEEDS[name]}: see the head of {name}")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    return done.stdout


def test_there_are_examples() -> None:
    if not EXAMPLES.is_dir():
        pytest.skip("not a checkout")
    assert len(SCRIPTS) >= 8


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NEEDS])  # test_grammar.py runs that one
def test_on_a_tiny_model(name: str, tiny_model: str, tmp_path: Path) -> None:
    run(name, tmp_path, tiny_model, SPECDEC_CACHE=str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_as_it_stands(name: str, smollm2: object, tmp_path: Path) -> None:
    run(name, tmp_path)


def test_a_failing_script_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "EXAMPLES", tmp_path)
    (tmp_path / "wrong.py").write_text("print('shown')\nassert False, 'on purpose'\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="on purpose"):
        run("wrong.py", tmp_path)
    (tmp_path / "silent.py").write_text("pass\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        run("silent.py", tmp_path)
