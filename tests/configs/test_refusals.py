"""What a measurement's command refuses before anything runs: values out of range, folders, flags, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from specdec import ConfigError, SpecdecError
from specdec.eval import halving
from specdec.eval import hydra_main as module
from specdec.eval.comparison import ComparisonConfig
from specdec.eval.entry import print_error
from specdec.eval.hydra_main import hydra_main, prepare
from specdec.eval.records import RECORDS
from specdec.eval.setting_checks import check_settings
from tests.configs.test_overrides import composed, refused

halving.register()  # as specdec.eval.sweep does


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("seed=foo", "seed=foo; allowed: an integer or null"),
        ("seed=99999999999999999999", "seed=99999999999999999999; allowed: an integer >= 0 or null"),
        ("seed=-1", "seed=-1; allowed: an integer >= 0"),
        ("context_tokens=2.5", "context_tokens=2.5; allowed: an integer or null"),
        ("context_tokens=0", "context_tokens=0; allowed: an integer >= 1 or null"),
        ("beside=5", "beside=5; allowed: {name: value}"),
        ("beside=ngram", "beside=ngram; allowed: {name: value}"),
        ("beside=null", "beside=null; allowed: {name: value}"),
        ("beside.X=5", "beside.X=5; allowed: settings such as"),
        ("peers=null", "peers=null; allowed: a list such as"),
        ("peers=foo", "peers=foo; allowed: a list such as"),
        ("peers=[transformer]", "unknown 'transformer'; did you mean 'transformers'?"),
        ("peers=[transformers,transformers]", "twice"),
        ("peer_options=5", "peer_options=5; allowed: {name: value}"),
        ("peer_options={llama: {}}", "no option 'peer_options.llama'; did you mean 'peer_options.llama_cpp'?"),
        ("peer_options={openvino: 5}", "peer_options.openvino=5; allowed: {option: value}, or {}"),
        (
            "peer_options.transformers.num_draft_tokens=3",
            "no option 'peer_options.transformers.num_draft_tokens'; available: none",
        ),
        (
            "peer_options.transformers_assisted={draft_modl: x}",
            "did you mean 'peer_options.transformers_assisted.draft_model'?",
        ),
        (
            "peer_options.transformers_assisted.num_draft_tokens=0",
            "num_draft_tokens=0; allowed: an integer >= 1 or null",
        ),
        ("peer_options.transformers_assisted.draft_model=5", "draft_model=5; allowed: a path or name, or null"),
        ("near_tie=-1", "near_tie=-1.0; allowed: a finite number >= 0 or null"),
        ("near_tie=nan", "near_tie=nan; allowed: a finite number >= 0 or null"),
        ("temperature=nan", "temperature=nan; allowed: a finite number >= 0"),
        ("temperature=null", "temperature=null; allowed: a number"),
        ("control=5", "control=5; allowed: true or false"),
        ("step_times=maybe", "step_times=maybe; allowed: true or false"),
        ("repeats=0", "repeats=0; allowed: an integer >= 1"),
        ("max_new_tokens=1", "max_new_tokens=1; allowed: an integer >= 2"),
        ("beside.X={dtype: bfloat16}", "no option 'beside.X.dtype'"),
        ("beside.X={tokenizer: null}", "no option 'beside.X.tokenizer'"),
        ("beside.X={max_draft_tokns: 3}", "did you mean 'beside.X.max_draft_tokens'?"),
        ("beside.X={max_draft_tokens: -1}", "beside.X.max_draft_tokens=-1; allowed: an integer >= 0"),
        ("beside.X={kv_dtype: int3}", "beside.X.kv_dtype='int3'; allowed"),
        ("beside.X={drafter: 5}", "beside.X.drafter=5; allowed: the name of a drafter"),
        ("beside.X={drafter_options: 5}", "beside.X.drafter_options=5; allowed: {option: value}"),
        ("beside.ngram={drafter_options: {max_ngam: 3}}", "did you mean 'beside.ngram.drafter_options.max_ngram'?"),
        ("drafter_options.foo=1", "no setting 'drafter_options'; did you mean 'drafter.options'?"),
        ("verifier_options={foo: 1}", "no setting 'verifier_options'; did you mean 'verifier.options'?"),
        ("besides.suffix={}", "no setting 'besides'; did you mean 'beside'?"),
        ("+besides.suffix={}", "no setting 'besides'; did you mean 'beside'?"),
        ("++besides.suffix={}", "no setting 'besides'; did you mean 'beside'?"),
        ("++engine.foo=1", "no setting 'engine.foo'"),
        ("+foo=1", "no setting 'foo'; available: batch_size, beside,"),
        ("~beside", "~beside: a setting cannot be taken away; give it another value: beside=..."),
        ("~verifier", "~verifier: a setting cannot be taken away"),
        ("~engine.kv_dtype", "~engine.kv_dtype: a setting cannot be taken away"),
        ("~besid", "no setting 'besid'; did you mean 'beside'?"),
        ("engine.max_draft_tokens=-1", "engine.max_draft_tokens=-1; allowed: an integer >= 0"),
        ("engine.kv_dtype=int3", "engine.kv_dtype='int3'; allowed"),
        ("engine.prefix_caching=5", "engine.prefix_caching=5; allowed: true or false"),
        ("engine.draft_length=foo", "engine.draft_length='foo'; allowed"),
        ("prompts.max_rows=0", "prompts.max_rows=0; allowed"),
        ("prompts=jsonl", "needs prompts.path"),
    ],
)
def test_a_comparison(word: str, said: str) -> None:
    assert said in refused("speedup", word)


@pytest.mark.parametrize(
    ("main", "word", "said"),
    [
        ("overhead", "repeats=foo", "repeats=foo; allowed: an integer"),
        ("overhead", "repeats=2.5", "repeats=2.5; allowed: an integer"),
        ("overhead", "repeats=null", "repeats=None; allowed: an integer"),
        ("overhead", "repeats=true", "repeats=True; allowed: an integer"),
        ("overhead", "+foo=1", "no setting 'foo'"),
        ("overhead", "~repeats", "~repeats: a setting cannot be taken away"),
        ("batching", "transformers=5", "transformers=5; allowed: true or false"),
        ("batching", "peer.page_size=foo", "peer.page_size=foo; allowed: an integer"),
        ("batching", "peer=5", "peer=5; allowed: {name: value}"),
        ("draft_budget", "drafters=ngram", "drafters=ngram; allowed: a list"),
        ("draft_length", "rates=[0.1,x]", "rates=[0.1, 'x']; allowed: a list"),
        ("draft_length", "rates=[0,nan]", "allowed: a list"),
        ("serve", "load.rate=0", "load.rate=0.0; allowed: a number over 0"),
    ],
)
def test_mains_without_a_dataclass(main: str, word: str, said: str) -> None:
    assert said in refused(main, word)


def test_what_is_allowed_stays_allowed() -> None:
    config = composed(
        "speedup", "+beside.X={}", "beside.tree={drafter: eagle3, drafter_options: {tree: dynamic}}", "near_tie=1e-3",
        "++beside.suffix={max_draft_tokens: 3}", "question=5", "peer_options.openvino_draft_model.draft_model=x",
        "+peers=[llama_cpp]", "+drafter=ngram", "seed=3",
    )  # fmt: skip
    assert set(config.beside) == {"X", "tree", "suffix"}
    assert config.peer_options.openvino_draft_model.draft_model == "x"
    assert (config.question, config.peers, config.drafter.name) == ("5", ["llama_cpp"], "ngram")
    assert "suffix" not in composed("sweep", "experiment=drafters", "~beside.suffix").beside
    assert composed("gpu_check", "large=null", "timings=true").large is None
    assert composed("draft_length", "rates=[0,1]").rates == [0, 1]
    assert composed("batching", "+peer.max_memory_percent=0.5").peer.max_memory_percent == 0.5


def test_every_value_of_a_sweep_is_in_range() -> None:
    assert "repeats=0" in refused("speedup", "-m", "repeats=1,0")
    assert "beside.X.foo" in refused("speedup", "-m", "beside.X={},{foo: 1}")


def test_a_comparison_is_checked_without_hydra_too() -> None:
    check_settings(ComparisonConfig, OmegaConf.create({"repeats": 2, "target": {"name": "x"}}))
    for wrong in (
        {"repeats": True},
        {"peers": "foo"},
        {"beside": 5},
        {"peer_options": 5},
        {"control": 1},
        {"question": 5},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            check_settings(ComparisonConfig, OmegaConf.create(wrong))
    assert ComparisonConfig().repeats == 3


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("hydra.sweeper.keep=2", "hydra.sweeper.keep=2; allowed: a share"),
        ("hydra.sweeper.keep=x", "hydra.sweeper.keep=x; allowed: a share"),
        ("hydra.sweeper.rungs=[2,1]", "hydra.sweeper.rungs=[2, 1]; allowed: numbers of prompts that grow"),
        ("hydra.sweeper.rungs=[a]", "hydra.sweeper.rungs=['a']; allowed"),
        ("hydra.sweeper.rungs=[]", "hydra.sweeper.rungs=[]; allowed"),
        ("hydra.sweeper.rungs=3", "hydra.sweeper.rungs=3; allowed"),
        ("hydra.sweeper.grids=[5]", "hydra.sweeper.grids=[5]; allowed"),
        ("hydra.sweeper.grids=x", "hydra.sweeper.grids=x; allowed"),
        ("hydra.sweeper.grids=['drafter=ngarm,none']", "drafter=ngarm is not there"),
        ("hydra.sweeper.grids=['drafter=ngram,none repeats=0']", "repeats=0; allowed"),
    ],
)
def test_a_halving(word: str, said: str) -> None:
    assert said in refused("sweep", "experiment=tune", word)


def test_two_settings_at_least_go_on() -> None:
    outcomes: dict[halving.Job, halving.Outcome] = {(str(i),): float(i) for i in range(4)}
    outcomes["5",] = "failed: it"
    assert halving.survivors(outcomes, 0.1) == [("3",), ("2",)]


def test_of_settings_without_scores_the_reasons_are_counted() -> None:
    outcomes: dict[halving.Job, halving.Outcome] = {(str(i),): reason for i, reason in enumerate("abbcde")}
    with pytest.raises(
        SpecdecError, match=r"none of 6 settings has a score.*: 2 x b; 1 x a; 1 x c; and 2 other reasons"
    ):
        halving.survivors(outcomes, 0.5)


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/here"), Path("/dev/null/x")):
        line = refused("overhead", f"hydra.run.dir={folder}")
        assert line.startswith(f"hydra.run.dir={folder} cannot be written to (")
        line = refused("speedup", "-m", "repeats=1,2", f"hydra.sweep.dir={folder}")
        assert line.startswith(f"hydra.sweep.dir={folder} cannot be written to (")
    prepare("overhead", [f"hydra.run.dir={tmp_path}/a/b"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_overrides_on_both_sides_of_a_flag() -> None:
    words = prepare("prefix", ["drafter=none", "-m", "repeats=1,2", "max_new_tokens=3"])
    assert words == ["-m", "drafter=none", "repeats=1,2", "max_new_tokens=3"]
    assert "repeats=foo" in refused("prefix", "drafter=none", "-m", "repeats=1,foo")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--config-dir /nope", "--config-dir /nope is not there"),
        ("--config-dir", "--config-dir"),
        ("--nonsense", "there is no flag '--nonsense'"),
        ("--cfg nonsense", "invalid choice: 'nonsense'"),
    ],
)
def test_flags(words: str, said: str) -> None:
    assert said in refused("prefix", *words.split())


def test_other_peoples_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(f"[bold]x[/x] {'word ' * 60}\n{chr(27)}[31m")
    shown = capsys.readouterr().err
    assert shown.startswith("error: [bold]x[/x] word")
    assert shown.count("\n") == 1 and "\x1b" not in shown
    print_error("Give one, drafter_options={'model': a folder or hub id}, or")
    assert capsys.readouterr().err == "error: Give one, drafter.options.model=<a folder or hub id>, or\n"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("", "interrupted\n"),
        (RECORDS, "interrupted; run the same command again with hydra.run.dir={}: it goes on where it stopped\n"),
        (f"point/{RECORDS}", "interrupted; run the same command again: it goes on where it stopped\n"),
    ],
)
def test_interrupted(
    left: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @hydra_main("overhead")
    def main(config: Any) -> None:
        if left:
            (tmp_path / left).parent.mkdir(exist_ok=True)
            (tmp_path / left).write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["overhead", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == said.format(tmp_path)


def test_interrupted_while_composing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "prepare", interrupt)
    with pytest.raises(SystemExit) as ended:
        hydra_main("overhead")(lambda config: None)()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_a_measurement_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @hydra_main("overhead")
    def main(config: Any) -> None:
        raise ConfigError("this [/x] is wrong")

    monkeypatch.setattr(sys, "argv", ["overhead", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: this [/x] is wrong\n"


def test_a_halving_with_one_setting_ends_in_one_line(tmp_path: Path) -> None:
    code = (
        "from specdec.eval import halving\nfrom specdec.eval.hydra_main import hydra_main\nhalving.register()\n"
        "@hydra_main('overhead')\ndef main(config): pass\nmain()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    words = ["-m", "hydra/sweeper=successive_halving", "hydra.sweeper.grids=['drafter=ngram']", "repeats=2"]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: there is one setting only")
    assert done.stderr.count("\n") == 1
