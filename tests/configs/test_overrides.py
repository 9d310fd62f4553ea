"""What a measurement's command says of overrides: every setting by its plain name, and one line for what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from specdec import ConfigError
from specdec.eval import hydra_main as module
from specdec.eval.hydra_main import hydra_main, prepare
from specdec.eval.llm_options import llm_options


def composed(main: str, *words: str) -> Any:
    plain = prepare(main, words)
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose(main, plain)


def refused(main: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(main, words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_settings_need_no_plus_and_bear_one(plus: str) -> None:
    words = ["engine.prefix_caching=true", "engine.kv_memory_bytes=2GiB", "engine.kv_dtype=int8", "repeats=7"]
    config = composed("prefix", *(plus + word for word in words))
    assert config.repeats == 7
    found = llm_options(config)
    assert (found["prefix_caching"], found["kv_memory_bytes"], found["kv_dtype"]) == (True, "2GiB", "int8")


@pytest.mark.parametrize("main", ["speedup", "acceptance", "sweep", "lossless", "quality"])
def test_the_length_of_answers_is_found_beside_the_engines_limits(main: str) -> None:
    assert composed(main, "engine.max_new_tokens=17").max_new_tokens == 17
    assert "-m" in prepare(main, ["-m", "+engine.max_new_tokens=5,6"])


def test_what_is_left_at_its_default_is_not_passed_on() -> None:
    assert set(llm_options(composed("prefix"))) == {
        "dtype", "drafter", "drafter_options", "verifier", "verifier_options"
    }  # fmt: skip
    assert llm_options(composed("prefix", "engine.max_draft_tokens=0"))["max_draft_tokens"] == 0


def test_options_of_methods_are_open() -> None:
    words = ["drafter=random", "drafter.options.branching=[2, 2]", "verifier=typical"]
    found = llm_options(composed("prefix", *words, "verifier.options.posterior_alpha=0.7"))
    assert found["drafter_options"] == {"branching": [2, 2]}
    assert found["verifier_options"] == {"posterior_alpha": 0.7}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("engine.prefix_cachin=true", "no setting 'engine.prefix_cachin'; did you mean 'engine.prefix_caching'? avail"),
        ("+engine.prefix_cachin=true", "no setting 'engine.prefix_cachin'; did you mean 'engine.prefix_caching'?"),
        ("target.nam=x", "no setting 'target.nam'; did you mean 'target.name'? available in target: dtype, name"),
        ("drafter.optons.x=1", "no setting 'drafter.optons'; did you mean 'drafter.options'?"),
        ("prompts.limt=1", "no setting 'prompts.limt'; did you mean 'prompts.limit'?"),
        ("max_new_tokns=1", "no setting 'max_new_tokns'; did you mean 'max_new_tokens'? available: drafter, engine,"),
        ("prefix_caching=true", "no setting 'prefix_caching'; did you mean engine.prefix_caching?"),
        ("zzz=1", "no setting 'zzz'; available: drafter, engine,"),
        ("engine.prefix_caching=maybe", "engine.prefix_caching=maybe; allowed: true or false"),
        ("engine.max_batch_size=1.5", "engine.max_batch_size=1.5; allowed: an integer"),
        ("engine.max_batch_size=null", "engine.max_batch_size=null; allowed: an integer"),
        ("engine.kv_memory_bytes=1.5", "engine.kv_memory_bytes=1.5; allowed: an integer or a text or null"),
        ("drafter=egle3", "drafter=egle3 is not there; did you mean 'eagle3'? available: adversary,"),
        ("load=default", "this measurement has no group 'load'; available: drafter, engine, prompts, target, verifier"),
        ("drafter=ngram drafter.options.max_ngam=3", "no option 'drafter.options.max_ngam'; did you mean 'drafter.opt"),
        ("verifier=typical +verifier.options.x=3", "verifier 'typical' has no option 'verifier.options.x'; available"),
        ("drafter=eagle", "drafter.options.model must be given"),
        ("target=path", "target.name must be given: target.name=..."),
        ("repeats={1", "'repeats={1' cannot be read"),
        ("repeats", "'repeats' cannot be read"),
        ("repeats=1,2", "repeats=1,2 is several values: add -m to run each, or write repeats=[1,2] for a list"),
        ("-m repeats=1,2 drafter=ngram,egle3", "drafter=egle3 is not there"),
        ("-m engine.max_batch_size=1,x", "engine.max_batch_size=x; allowed: an integer"),
        ("--config-name=nope", "nope: Cannot find primary config 'nope'"),
    ],
)
def test_one_line(words: str, said: str) -> None:
    assert said in refused("prefix", *words.split())


def test_who_only_looks_need_not_name_everything() -> None:
    words = ["--cfg", "job", "target=path", "drafter=eagle"]
    assert prepare("prefix", words) == words
    assert "no setting 'zzz'" in refused("prefix", *words, "zzz=1")


def test_words_come_back_as_they_are() -> None:
    words = ["-m", "drafter=none,ngram", "+engine.kv_dtype=int8", "prompts.limit=range(1,3)", "+verifier.options={}"]
    assert prepare("prefix", words) == [w.replace("+engine", "engine").replace("+ver", "ver") for w in words]


def test_sweeps_of_the_config_itself_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    text = (
        "# @package _global_\nhydra: {{mode: MULTIRUN, sweeper: {{params: {{drafter: 'none,{}', repeats: '1,2'}}}}}}\n"
    )
    words = ["--config-dir", str(tmp_path), "+experiment=mine"]
    path.write_text(text.format("ngram"))
    assert prepare("prefix", words) == words
    path.write_text(text.format("ngrm"))
    assert "drafter=ngrm is not there; did you mean 'ngram'?" in refused("prefix", *words)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    @hydra_main("overhead")
    def main(config: Any) -> None:
        asked.append(config)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["overhead", "+engine.max_batch_size=3", "repeats=5"])
    main()
    assert (asked[0].engine.max_batch_size, asked[0].repeats) == (3, 5)
    monkeypatch.setattr(sys, "argv", ["overhead", "-m", "repeats=1,2"])
    main()
    assert [config.repeats for config in asked] == [5, 1, 2]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["overhead", "reapeats=5"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: there is no setting 'reapeats'; did you mean 'repeats'?")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert len(asked) == 3


def test_hydras_own_help_is_left_to_it() -> None:
    assert prepare("prefix", ["--hydra-help"]) == ["--hydra-help"]
    assert module.CONFIGS == "specdec.configs"


def test_schemas_are_there_for_whoever_composes() -> None:
    code = (
        "from hydra import compose, initialize_config_module\n"
        "with initialize_config_module('specdec.configs', version_base='1.3'):\n"
        "    print(compose('serve', ['load.rate=3', 'engine.prefix_caching=true']).load.rate)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3.0\n"
