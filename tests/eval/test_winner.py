"""The command at the end of `experiment=tune`: it has every setting that was given, and it can be run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import specdec
from specdec.cli import app
from specdec.eval import halving
from specdec.eval.hydra_main import prepare
from specdec.eval.winner import command_of
from tests.eval.known_model import config_for, overrides_for, save_known_model

halving.register()  # as specdec.eval.sweep does
GIVEN = ["temperature=0.7", "seed=3", "ignore_eos=true", "verifier=match", "engine.kv_block_tokens=8"]
SETTING = ["drafter=ngram", "drafter.options.min_ngram=2", "engine.max_draft_tokens=6"]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


def test_it_has_all_that_was_given_and_runs(known: Path) -> None:
    words = [*overrides_for(known), *GIVEN, *SETTING, "experiment=tune", "name=mine"]
    line, call, again = command_of(config_for("sweep", known, *GIVEN, *SETTING, "experiment=tune"), words).splitlines()
    line, beside = line.split("   (")
    assert "without kv_block_tokens" in beside
    for flag in ("--temperature 0.7", "--seed 3", "--ignore-eos", "--verifier match", "--drafter-option min_ngram=2"):
        assert flag in line
    assert "--max-draft-tokens 6" in line
    argv = ["xA" if word == "..." else word for word in shlex.split(line)]
    done = CliRunner().invoke(app, [*argv[1:], "--max-new-tokens", "5", "--raw"])
    assert done.exit_code == 0, done.output

    (completion,) = eval(call.replace("...", "'xA', max_new_tokens=5"), {"specdec": specdec})
    assert len(completion.token_ids) == 5

    assert shlex.split(again)[:3] == ["specdec", "eval", "speedup"]
    found = prepare("speedup", shlex.split(again)[3:])
    assert {*GIVEN, *SETTING} <= set(found) and not any(w.startswith(("experiment", "name")) for w in found)


def test_it_has_nothing_that_was_not_given(known: Path) -> None:
    line, call, again = command_of(config_for("sweep", known, "drafter=ngram"), ["drafter=ngram"]).splitlines()
    assert line.split() == f"specdec generate --model {known} --dtype float64 --drafter ngram --prompt ...".split()
    assert call.strip() == f"specdec.LLM('{known}', dtype='float64', drafter='ngram').generate(...)"
    assert again.strip() == "specdec eval speedup drafter=ngram"
