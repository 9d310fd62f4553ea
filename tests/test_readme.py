"""What README.md says: its code runs, its commands exist, its tree is the repository's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import specdec
from specdec.cli import app
from specdec.eval.hydra_main import prepare
from tests.tiny_chat_model import save_tiny_chat_model

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands(first_word: str) -> list[str]:
    """Return the README's shell commands by that name, comments and what is piped into them cut off."""
    lines = [line.partition("  #")[0] for block in blocks("bash") for line in block.splitlines()]
    parts = [line.rpartition("| ")[2].strip() for line in lines]
    return [part for part in parts if part.split()[:1] == [first_word]]


EXAMPLE, SERVER = blocks("python")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("readme") / "tiny"))


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))


def test_python_runs_on_a_tiny_model(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_example(EXAMPLE.replace('"smollm2"', repr(tiny_model)))
    plain = specdec.LLM(tiny_model).chat([{"role": "user", "content": "Why is the sky blue?"}], max_new_tokens=48)
    assert names["answer"].token_ids == plain.token_ids
    assert capsys.readouterr().out.startswith(plain.text)


@pytest.mark.slow
def test_python_runs_as_it_stands(smollm2: object, capsys: pytest.CaptureFixture[str]) -> None:
    run_example(EXAMPLE)
    shown = capsys.readouterr().out
    assert "scattering" in shown
    assert "three, four, five, six" in shown


def run_example(code: str) -> dict[str, object]:
    """Run a block and check its last part against transformers' own generate()."""
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    model, batch, ids = names["model"], names["batch"], names["ids"]
    expected = model.generate(**batch, max_new_tokens=16, do_sample=False)
    assert torch.equal(ids, expected)
    return names


def test_example_is_short() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip() and not line.startswith("#")]) <= 15


def test_the_server_answers_every_request(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(SERVER.replace('"smollm2"', repr(tiny_model)), "README.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 3  # a line of each; texts may have further ones
    assert names["engine"].metrics().num_finished == 3
    names["engine"].check_integrity()


EVALUATIONS = [command for command in commands("specdec") if command.split()[1] in ("eval", "report")]


@pytest.mark.parametrize("command", [command for command in EVALUATIONS if command.split()[1] == "eval"])
def test_evaluations_are_what_can_be_asked_for(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, name, *words = shlex.split(command)
    assert prepare(name, words)


def test_the_grid_and_its_report_run(tiny_model: str, tmp_path: Path) -> None:
    sweep, report = (
        next(c for c in EVALUATIONS if what in c).split()[1:] for what in ("specdec eval sweep -m", "specdec report")
    )
    little = [f"target.name={tiny_model}", "max_new_tokens=6", "repeats=1", "step_times=false", "prompts=builtin"]
    for arguments in ([*sweep, *little, "prompts.limit=2"], report):
        run = subprocess.run(
            [sys.executable, "-m", "specdec", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )
        assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "outputs/sweep/mine/report/index.html").is_file()


@pytest.mark.parametrize("command", [command for command in commands("specdec") if command not in EVALUATIONS])
def test_command_runs(command: str, tiny_model: str) -> None:
    arguments = shlex.split(command)[1:]
    arguments = [tiny_model if word == "smollm2" else word for word in arguments]
    if arguments[0] in ("generate", "chat") and "--model" not in arguments:
        arguments += ["--model", tiny_model]
    result = CliRunner().invoke(app, arguments, input="def fibonacci(n):\n")
    assert result.exit_code == 0, result.output


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    named = {command.split()[1] for command in commands("make")} | set(re.findall(r"`make ([a-z-]+)", README))
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


def test_modules_exist() -> None:
    found = re.findall(r"python -m (specdec[\w.]*\w)", README)
    assert found
    for module in found:
        assert (REPOSITORY / f"{module.replace('.', '/')}.py").is_file(), module


def test_tree_is_the_repository() -> None:
    (tree,) = blocks("text")
    folder = REPOSITORY
    for line in tree.splitlines():
        path = line.split()[0]
        folder = folder if line.startswith("  ") else REPOSITORY / path
        assert (folder / path if line.startswith("  ") else folder).exists(), line


def test_links_lead_somewhere() -> None:
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/design.md",
        "docs/roadmap.md",
        "docs/dependencies.md",
    ):
        source = REPOSITORY / name
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", source.read_text(encoding="utf-8")):
            linked = source.parent / target if target else source
            assert linked.exists(), f"{name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
                assert anchor[1:] in {slug(heading) for heading in headings}, f"{name}: {anchor}"


def slug(heading: str) -> str:
    """Return the anchor that a heading gets on the usual code hosts."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_dependency_is_explained() -> None:
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    page = (REPOSITORY / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\|(?: `\w+` \|)? ([\w-]+) \|", page, flags=re.MULTILINE))
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]
    assert names <= rows, names - rows
