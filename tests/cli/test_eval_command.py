"""`specdec eval NAME`: the measurement's own words, output and exit code; the list costs no torch."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import specdec
from specdec.cli.eval_command import completed, measurements
from tests.cli.running import refused, run

FOLDER = Path(specdec.__file__).parent / "eval"


def in_a_shell(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "specdec", "eval", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_list() -> None:
    result = run("eval")
    assert result.exit_code == 0
    for name, line in measurements():
        assert f"\n{name} " in f"\n{result.stdout}"
        assert line.endswith((".", "?"))
    assert {"acceptance", "speedup", "lossless", "serve", "gpu_check", "rollback"} <= dict(measurements()).keys()
    assert "records" not in dict(measurements())


def test_unknown_name() -> None:
    line = refused(run("eval", "lossles", "drafter=ngram"))
    assert "no measurement 'lossles'; did you mean 'lossless'? available: acceptance, " in line


def test_words_reach_the_measurement_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run_module(name: str, run_name: str, alter_sys: bool) -> None:
        assert (name, run_name, alter_sys) == ("specdec.eval.prefix", "__main__", True)
        seen.append(sys.argv[1:])
        sys.exit(1)

    monkeypatch.setattr(runpy, "run_module", run_module)
    before = list(sys.argv)
    words = ["-m", "drafter=ngram,none", "--cfg", "job", "--help", "-h", "~engine", "+a.b={c: [1, 2]}", "--resolve"]
    assert run("eval", "prefix", *words).exit_code == 1
    assert seen == [words]
    assert sys.argv == before


def test_the_same_as_the_module(tmp_path: Path) -> None:
    words = ["overhead", "--cfg", "job", "engine.prefix_caching=true", "drafter=ngram"]
    ours = in_a_shell(*words, folder=tmp_path)
    module = [sys.executable, "-m", f"specdec.eval.{words[0]}", *words[1:]]
    theirs = subprocess.run(module, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (ours.returncode, ours.stdout) == (0, theirs.stdout)
    assert "prefix_caching: true" in ours.stdout


def test_exit_codes_are_the_measurements(tmp_path: Path) -> None:
    wrong = in_a_shell("overhead", "drafter=ngarm", folder=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: drafter=ngarm is not there; did you mean 'ngram'?")
    assert "Traceback" not in wrong.stderr
    late = in_a_shell("overhead", "max_new_tokens=1", folder=tmp_path)
    assert late.returncode == 2
    assert "error: max_new_tokens=1; allowed: at least 2" in late.stderr


@pytest.mark.parametrize("words", [["eval", "--help"], ["eval"], ["eval", "lossles"]])
def test_no_torch(words: list[str]) -> None:
    code = (
        f"import sys\nfrom specdec.cli import app\ntry:\n    app({words!r})\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_completion() -> None:
    assert completed("chunked") == ["chunked_prefill"]
    assert all((FOLDER / f"{name}.py").is_file() for name in completed(""))
