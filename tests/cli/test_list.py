"""`specdec list`, `--version`, `--help`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec import __version__
from specdec.registry import DRAFTERS, VERIFIERS
from tests.cli.running import as_json, run


def test_names_all() -> None:
    result = run("list")
    assert result.exit_code == 0
    for name in (*DRAFTERS.names(), *VERIFIERS.names(), "auto", "smollm2", "SmolLM2-135M-Instruct"):
        assert re.search(rf"^ *{name}\b|\b{name}\b", result.stdout, re.MULTILINE), name
    assert "max_ngram=3, min_ngram=1" in result.stdout
    assert re.search(r"^smollm2-draft_model +draft_model for smollm2", result.stdout, re.MULTILINE)
    assert max(map(len, result.stdout.splitlines())) <= 80
    ordinary, _, tests = result.stdout.partition("Drafters for tests")
    assert re.search(r"^oracle\b", tests, re.MULTILINE)
    assert not re.search(r"^oracle\b", ordinary, re.MULTILINE)


def test_json() -> None:
    found = as_json(run("list", "--json"))
    assert {"oracle", "adversary", "scripted", "random"} == {row["name"] for row in found["test_drafters"]}
    assert {"none", "ngram", "self_int8"} <= {row["name"] for row in found["drafters"]}
    assert found["verifiers"][0]["name"] == "auto"
    assert {row["name"]: row["lossless"] for row in found["verifiers"]}["match"] is True
    trained = {"name": "smollm2-eagle3", "drafter": "eagle3", "target": "smollm2"}
    assert trained in found["trained_drafters"]
    (ngram,) = [row for row in found["drafters"] if row["name"] == "ngram"]
    assert ngram["options"] == {"max_ngram": 3, "min_ngram": 1}


def test_broken_plug_in_does_not_hide_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS.table, "broken", "no_such_package:Drafter")
    result = run("list")
    assert result.exit_code == 0
    assert "cannot be loaded" in result.stdout
    assert "self_int8" in result.stdout
    assert "no_such_package" in json.dumps(as_json(run("list", "--json")))


def test_version_and_help() -> None:
    assert run("--version").stdout == f"specdec {__version__}\n"
    for arguments in (["--help"], ["generate", "--help"], ["chat", "-h"], ["check", "-h"], ["list", "-h"]):
        result = run(*arguments)
        assert result.exit_code == 0
        assert "130 Ctrl-C" in " ".join(result.stdout.split())


def test_a_closed_pipe_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "specdec", "list"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 2
    assert "no room to write to" in result.stderr
    assert "Traceback" not in result.stderr
