"""`specdec train`: from prompts to a measured drafter, what it refuses, and what a stopped run leaves."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from rich.console import Console

from specdec import LLM
from specdec.cli import completion, train_view
from specdec.cli.recipes import compose, recipes
from specdec.errors import ConfigError
from specdec.train.advice import ADVISED
from specdec.train.capture import Capture
from specdec.train.folder_lock import alone_in
from specdec.train.jobs import METHODS, OPTIONS
from specdec.train.loop import Loop
from specdec.train.run import RunConfig
from tests.cli.running import Result, as_json, refused, run

SMALL = (
    *("data.held_out_share=0.3", "data.max_examples=12", "data.samples_per_prompt=1", "capture.max_new_tokens=12"),
    *("draft_vocab_size=64", "loop.num_tokens=400", "loop.batch_tokens=48", "loop.evaluate_tokens=100"),
    *("loop.precision=no", "measure.num_prompts=2", "measure.max_new_tokens=8"),
)
OF_METHOD: dict[str, tuple[str, ...]] = {
    "eagle3": ("options.steps=2", "options.first_share=0", "settings.tree=[2,1]", "settings.max_draft_tokens=4"),
    "medusa": ("options.num_heads=2",),
    "draft_model": ("options.layers=[1]",),
}
KILLED = """
import os, signal, sys
from specdec.cli import app
from specdec.train.loop import Loop

train_on, note = Loop._train_on, Loop._note

def until_the_sixth_batch(self, batch):
    if self.progress.num_batches == 6:
        with (self.folder / "curve.jsonl").open("a") as file:
            file.write('{"num_batches": 6, "num_')
        os.kill(os.getpid(), signal.SIGKILL)
    return train_on(self, batch)

Loop._train_on = until_the_sixth_batch
app(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    rows = [{"prompt": f"{a} and {b}"} for a in words for b in words[:3]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that the runs share: prompts are answered once."""
    return str(tmp_path_factory.mktemp("features") / "of_tiny")


def train(method: str, model: str, prompts: str, out: Path, features: str, *more: str) -> Result:
    own = ("train", method, "--target", model, "--prompts", prompts, "--out", str(out), "--features", features)
    return run(*own, *SMALL, *OF_METHOD[method], *more)


def curve_of(out: Path) -> list[int]:
    lines = (out / "checkpoints" / "curve.jsonl").read_text().splitlines()
    return [json.loads(line)["num_batches"] for line in lines if line.endswith("}")]


@pytest.mark.parametrize("method", METHODS)
def test_to_a_drafter(method: str, model: str, prompts: str, features: str, tmp_path: Path) -> None:
    found = as_json(train(method, model, prompts, tmp_path, features, "--json"))
    folder = Path(found["folder"])
    assert folder == tmp_path / "drafter"
    rows = found["acceptance"]
    assert [row["name"].partition(",")[0] for row in rows] == ["none", method] + [method] * (method != "draft_model")
    assert rows[0]["acceptance_length"] == 1
    assert all(row["num_equal"] == row["num_prompts"] == 2 and row["acceptance_length"] >= 1 for row in rows)
    card = (folder / "README.md").read_text()
    assert f"| prompts | {prompts} |" in card
    assert f"| {rows[1]['name']} | {rows[1]['acceptance_length']:.3f} |" in card
    assert len(re.findall(r"^\| [\d,]+ \| \d+\.\d \|", card, re.MULTILINE)) == len(curve_of(tmp_path)) == 4
    assert (folder / "curve.png").read_bytes()[1:4] == b"PNG"
    assert found["last"]["num_tokens"] >= 400
    assert "acceptance_length" in found["last"]
    llm = LLM(model, drafter=str(folder))
    assert llm.generate("one and", max_new_tokens=8)[0].stats.num_draft_tokens > 0


class TestRefused:
    def test_settings(self, model: str, prompts: str, features: str, tmp_path: Path) -> None:
        def said(*more: str) -> str:
            return refused(train("eagle3", model, prompts, tmp_path, features, *more))

        assert "'loop.num_token'; did you mean 'loop.num_tokens'?" in said("loop.num_token=3")
        assert "did you mean 'options.step_decay' or" in said("options.step_decy=0.5")
        few = said("loop.num_token=3")
        assert "docs/train_a_drafter.md" in few
        assert "loop.learning_rate" not in few
        others = said("options.heads=3")
        assert "'options.heads'" in others
        assert "options.first_share, options.first_steps" in others
        assert "'settings.treee'; did you mean 'settings.tree'?" in said("settings.treee=chain")
        assert "loop.num_tokens='many'" in said("loop.num_tokens=many")
        assert "options.steps='two'; allowed: an integer >= 1" in said("options.steps=two")
        assert "first_steps=3; allowed: 1 to steps=2" in said("options.first_steps=3")
        assert "settings.max_draft_tokens=0" in said("settings.max_draft_tokens=0")
        assert "settings.tree='nonsense'; allowed: 'chain', 'dynamic'" in said("settings.tree=nonsense")
        assert "takes the 9 likeliest tokens, and draft_vocab_size=8" in said("settings.tree=[9]", "draft_vocab_size=8")
        too_deep = train("medusa", model, prompts, tmp_path, features, "settings.tree=[2,1,1]")
        assert "is 3 deep, and options.num_heads=2 heads guess no further" in refused(too_deep)
        assert "learning_rate=nan; allowed: a number from" in said("loop.learning_rate=nan")
        assert "data.held_out_share=2.0; allowed: 0 to 1" in said("data.held_out_share=2")
        assert "capture.temperatures=[]" in said("capture.temperatures=[]")
        assert "is not key=value" in said("loop.num_tokens")
        assert "is given a second time" in said("target=other")
        assert not tmp_path.joinpath("run.json").exists()

    def test_methods_and_recipes(self, model: str, prompts: str, tmp_path: Path) -> None:
        assert "no method 'eagel'; did you mean 'eagle3'?" in refused(run("train", "eagel"))
        assert "needs --prompts and --target; or --recipe" in refused(run("train", "eagle3"))
        assert "did you mean 'smollm2_medusa'" in refused(run("train", "medusa", "--recipe", "smollm_medusa"))
        assert "is a recipe for 'eagle3'" in refused(run("train", "medusa", "--recipe", "smollm2_eagle3"))
        own = tmp_path / "own.yaml"
        own.write_text("loop: {num_tokns: 3}\n")
        assert "did you mean 'loop.num_tokens'" in refused(run("train", "medusa", "--recipe", str(own)))
        assert "no such file" in refused(run("train", "medusa", "--recipe", str(tmp_path / "none.yaml")))
        own.write_text("loop: [\n")
        assert "cannot be read as YAML" in refused(run("train", "medusa", "--recipe", str(own)))

    @pytest.mark.parametrize(
        ("name", "text", "complaint"),
        [
            ("none.jsonl", None, "there is no such file"),
            ("empty.json", "[]", "none of its 0 rows holds a prompt"),
            ("silent.jsonl", '{"prompt": " "}\n{"answer": "b"}\n', "none of its 2 rows holds a prompt"),
            ("object.json", '{"prompt": "a"}', "must hold an array"),
        ],
    )
    def test_prompts(
        self, name: str, text: str | None, complaint: str, model: str, features: str, tmp_path: Path
    ) -> None:
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        assert complaint in refused(train("medusa", model, str(path), tmp_path / "out", features))
        assert not (tmp_path / "out").exists()

    def test_long_prompts(self, model: str, prompts: str, features: str, tmp_path: Path) -> None:
        done = train("medusa", model, prompts, tmp_path, features, "data.max_prompt_tokens=3")
        assert "raise data.max_prompt_tokens" in refused(done)

    def test_features_of_another_target(self, model: str, prompts: str, tmp_path: Path) -> None:
        about = {"target": "another", "hidden_size": 8, "vocab_size": 9, "layers": [0]}
        (tmp_path / "store.json").write_text(json.dumps(about))
        said = refused(train("medusa", model, prompts, tmp_path / "out", str(tmp_path)))
        assert "'another'" in said
        assert "give another folder" in said

    def test_a_small_disk(self, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
        result = train("medusa", model, prompts, tmp_path / "out", str(tmp_path / "features"))
        assert "lower data.max_examples" in refused(result)
        assert re.search(r"capture: \d+ prompts, at most \d+ tokens", result.stderr), "the size is announced"
        assert not list((tmp_path / "features").glob("shard-*"))


def test_a_killed_run_goes_on(
    model: str, prompts: str, features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = ("medusa", model, prompts)
    assert train(*command, whole, features).exit_code == 0
    every_batch = ("loop.checkpoint_minutes=0",)
    arguments = ["train", "medusa", "--target", model, "--prompts", prompts, "--out", str(killed)]
    arguments += ["--features", features, *SMALL, *OF_METHOD["medusa"], *every_batch]
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        env={**os.environ, "SPECDEC_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (killed / "drafter").exists()
    assert len(list((killed / "checkpoints").glob("checkpoint-*"))) == 1
    assert "holds a run that was begun with other values: data.max_examples=12" in refused(
        train(*command, killed, features, *every_batch, "data.max_examples=11")
    )
    with monkeypatch.context() as patch:
        patch.setattr("specdec.train.run.load_model", lambda *args, **options: pytest.fail("the target was loaded"))
        said = refused(train(*command, killed, features, *every_batch, "loop.num_tokens=900"))
    assert "other values of num_tokens: loop.num_tokens=400, not 900" in said
    assert f"init={killed}/drafter --features {features}" in said
    with alone_in(killed):
        said = refused(train(*command, killed, features, *every_batch))
        assert f"another training run is writing into {killed}" in said
    (killed / "run.json").write_text('{"meth')
    resumed = train(*command, killed, features, *every_batch)
    assert resumed.exit_code == 0
    assert "run.json is damaged and is written anew" in " ".join(resumed.stderr.split())
    assert json.loads((killed / "run.json").read_text())["method"] == "medusa"
    assert curve_of(killed) == curve_of(whole), "the curve has a gap"
    batches = curve_of(killed)
    done = train(*command, killed, features, *every_batch)
    assert done.exit_code == 0
    assert curve_of(killed) == batches, "a finished run goes no further"


def test_ctrl_c(model: str, prompts: str, features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_on = Loop._train_on

    def third(self: Loop, batch: Any) -> Any:
        if self.progress.num_batches == 2:
            signal.raise_signal(signal.SIGINT)
        return train_on(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_train_on", third)
        result = train("medusa", model, prompts, tmp_path, features)
    assert result.exit_code == 130
    assert re.search(r"stopped in the stage 'train', at \d+ of 400; the same command goes on", result.stderr)
    assert (tmp_path / "checkpoints" / "checkpoint-3").is_dir(), "the batch was finished and saved"
    assert not (tmp_path / "drafter").exists()
    assert train("medusa", model, prompts, tmp_path, features).exit_code == 0


def test_ctrl_c_while_answering(model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, features = tmp_path / "out", str(tmp_path / "features")
    finish, finished = Capture._finish, list[int]()

    def sixth(self: Capture, request_id: int) -> int:
        if len(finished) == 5:
            raise KeyboardInterrupt
        finished.append(request_id)
        return finish(self, request_id)

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "_finish", sixth)
        result = train("medusa", model, prompts, out, features)
    assert result.exit_code == 130
    assert re.search(r"stage 'capture': 5 of \d+ prompts are answered and stored; the same command", result.stderr)
    said = refused(train("eagle3", model, prompts, out, features))
    assert "was begun with other values: method='medusa'" in said
    assert f"--features {features}" in said
    assert train("medusa", model, prompts, out, features, "measure.num_prompts=0").exit_code == 0


@pytest.mark.parametrize("is_terminal", [False, True])
def test_time_left(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock = io.StringIO(), iter(range(0, 400, 40))
    console = Console(file=file, force_terminal=is_terminal, width=120, highlight=False)
    monkeypatch.setattr(train_view, "messages", lambda: console)
    monkeypatch.setattr(train_view, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with train_view.TrainView() as view:
        view.stage("train", "a head", total=1000)
        for done in (500, 600, 1000):  # a resumed run: its speed is 100 in 40 s
            view.trained(done, {"loss": 1.5, "accuracy": [0.25] * (3 if done == 1000 else 1)})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert text.startswith("train: a head\n")
    assert text.count("from here on 3 draft tokens per position are learned, so the loss jumps") == 1
    if is_terminal:
        assert "ETA" in text
        assert "1,000 of 1,000 tokens, loss 1.500, first token right 25.0%" in text
        assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1
    else:
        assert "600 of 1,000 tokens, loss 1.500, first token right 25.0%, ETA 3 min\n" in text


class TestRecipes:
    @pytest.mark.parametrize("name", recipes())
    def test_shipped(self, name: str) -> None:
        method = next(m for m in METHODS if name == f"smollm2_{m}")
        config = compose(method, {}, name, [])
        assert isinstance(config, RunConfig)
        assert config.method == method
        assert str(config.out) == f"outputs/train/{name}"
        assert (config.target, config.data.prompts) == ("smollm2", "sharegpt")

    @pytest.mark.parametrize("method", METHODS)
    def test_defaults(self, method: str) -> None:
        config = compose(method, {"target": "a/t", "data.prompts": "p.jsonl"}, None, [])
        assert (config.method, str(config.out)) == (method, f"outputs/train/{method}-t")
        assert len(recipes()) == len(METHODS), "a file of configs/train that no test builds"

    def test_order(self, tmp_path: Path) -> None:
        own = tmp_path / "own.yml"
        own.write_text("data: {prompts: a.jsonl, max_examples: 7}\nloop: {num_tokens: 5, seed: 3}\n")
        config = compose(
            "eagle3", {"target": "a/b", "data.prompts": "c.json"}, str(own), ["loop.seed=4", "loop.learning_rate=1e-3"]
        )
        assert (config.data.prompts, config.data.max_examples) == ("c.json", 7)
        assert (config.loop.num_tokens, config.loop.seed, config.loop.learning_rate) == (5, 4, 1e-3)
        assert config.capture.temperatures == (0.0, 1.0)
        assert str(config.out) == "outputs/train/eagle3-b"

    def test_none_is_a_value(self) -> None:
        given = {"target": "t", "data.prompts": "p"}
        assert compose("eagle3", given, None, ["data.max_examples=null"]).data.max_examples is None
        with pytest.raises(ConfigError, match=r"loop\.seed"):
            compose("eagle3", given, None, ["loop.seed=null"])


def settings(kind: Any, before: str = "") -> dict[str, Any]:
    """Return the dotted names of a run's settings and their defaults."""
    found: dict[str, Any] = {}
    for f in fields(kind):
        if is_dataclass(f.default_factory):
            found |= settings(f.default_factory, f"{before}{f.name}.")
        elif f.name not in ("options", "settings", "method", "target", "out", "features"):
            found[before + f.name] = f.default
    return found


PAGE = Path(__file__).resolve().parents[2] / "docs" / "train_a_drafter.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="not a checkout")
class TestPage:
    """What docs/train_a_drafter.md says, compared with the code."""

    def test_every_setting(self) -> None:
        table = PAGE.read_text().split("<!-- settings -->")[1].lstrip().partition("\n\n")[0]
        rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]*) \|", table, re.MULTILINE)
        told = {name: default.strip().strip("`") for name, default in rows}
        expected = {name: str(list(d) if isinstance(d, tuple) else d) for name, d in settings(RunConfig).items()}
        own = {f"options.{name}" for options in OPTIONS.values() for name in options}
        assert told.keys() == expected.keys() | own | {f"settings.{name}" for name in ADVISED}
        assert {name: told[name] for name in expected} == expected

    def commands(self, first: str) -> list[list[str]]:
        blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines = [line.partition("  #")[0].partition(first) for block in blocks for line in block.splitlines()]
        return [shlex.split(rest) for _, found, rest in lines if found]

    def test_commands_train(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        asked: list[RunConfig] = []
        monkeypatch.setattr("specdec.train.run.run", lambda config, view: asked.append(config))
        found = self.commands("specdec train ")
        for words in found:
            assert run("train", *words).exit_code == 0
        assert len(asked) == len(found) == 4
        assert (asked[0].method, asked[0].data.prompts, str(asked[0].out)) == (
            "eagle3",
            "my_prompts.jsonl",
            "runs/llama-1b",
        )

    def test_commands_measure(self) -> None:
        found = self.commands("python -m specdec.eval.")
        assert [words[0] for words in found] == ["acceptance", "speedup"]
        for name, *words in found:
            with initialize_config_module("specdec.configs", version_base=None):
                config = hydra_compose(name, overrides=words)
            assert config.drafter.options.model == "runs/llama-1b/drafter"


def test_help() -> None:
    text = " ".join(run("train", "--help").stdout.split())
    assert all(f" {name}: " in text for name in METHODS)
    assert all(name in text for name in (*recipes(), "--trust-remote-code", "docs/train_a_drafter.md"))


def test_completion() -> None:
    assert completion.TRAIN_METHODS == METHODS
    assert completion.recipes("smollm2_m") == ["smollm2_medusa"]
