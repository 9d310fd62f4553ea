"""Shell completion, and that it does without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

from specdec import LLM
from specdec.cli import completion
from specdec.cli.options import DEFAULTS
from specdec.draft_length import DRAFT_LENGTHS
from specdec.engine_config import EngineConfig
from specdec.kv.codecs import LARGEST
from specdec.models import dtypes
from specdec.registry import DRAFTERS, VERIFIERS


def completed(*words: str) -> list[str]:
    """Return what bash is told for the last word."""
    environment = {
        "_SPECDEC_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["specdec", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = subprocess.run(
        [sys.executable, "-m", "specdec"], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return result.stdout.split()


def test_in_a_shell() -> None:
    assert completed("generate", "--drafter", "se") == ["self_int8"]
    assert completed("chat", "--verifier", "a") == ["auto"]
    assert completed("check", "smo") == ["smollm2"]
    assert completed("generate", "--draft-le") == ["--draft-length"]
    assert completed("ch") == ["chat", "check"]


def test_names_are_the_registries() -> None:
    assert completion.drafters("") == DRAFTERS.names()
    assert completion.verifiers("") == ["auto", *VERIFIERS.names()]
    assert completion.DRAFT_LENGTHS == DRAFT_LENGTHS
    assert sorted(LARGEST) == sorted(completion.QUANTISED_KV)
    assert set(completion.DTYPES) == set(dtypes._NAMES)


def test_models_are_names_folders_and_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("smart.gguf", "smart.txt"):
        (tmp_path / name).touch()
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "a.GGUF").touch()
    monkeypatch.chdir(tmp_path)
    assert completion.models("sm") == ["smollm2", "small/", "smart.gguf"]
    assert completion.models("small/") == ["small/a.GGUF"]
    assert completion.models(f"{tmp_path}/smar") == [f"{tmp_path}/smart.gguf"]
    assert completion.models("no/such/folder") == []


def test_defaults_are_the_librarys() -> None:
    engine = EngineConfig()
    for name, value in DEFAULTS.items():
        parameter = signature(LLM.generate).parameters.get(name)
        assert value == (getattr(engine, name) if parameter is None else parameter.default), name


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_no_torch_for_help(argument: str) -> None:
    code = (
        "import sys\nfrom specdec.cli import app, completion\n"
        "completion.drafters(''), completion.verifiers(''), completion.models(''), completion.dtypes('')\n"
        f"try:\n    app([{argument!r}])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
