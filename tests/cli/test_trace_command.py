"""`specdec trace`: where the page goes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.trace import VARIABLE
from tests.cli.running import generate, refused, run
from tests.debug.traces import first, header, step, write


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "t.jsonl", header(), step(1, first(0, [9], 4), first(0, [9], 5)))


def test_from_the_generation_to_the_page(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    assert generate(model, "--drafter", "ngram").exit_code == 0
    result = run("trace", str(path))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"wrote {tmp_path / 't.html'}; open it in a browser\n"
    assert (tmp_path / "t.html").read_text().startswith("<!DOCTYPE html>")


def test_another_place(trace: Path, tmp_path: Path) -> None:
    result = run("trace", str(trace), "--output", str(tmp_path / "page.htm"), "--request", "5", "--run", "1")
    assert result.exit_code == 0, result.output
    assert not trace.with_suffix(".html").exists()
    text = (tmp_path / "page.htm").read_text()
    assert '"id":5' in text
    assert '"id":4' not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--request", "7"), "no request 7"),
        (("--run", "9"), "no run '9'"),
        (("--output", "absent/page.html"), "cannot be written"),
        (("--output", "t.jsonl"), "would replace its trace"),
    ],
)
def test_refused(
    options: tuple[str, str], said: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = trace.read_bytes()
    assert said in refused(run("trace", "t.jsonl", *options))
    assert trace.read_bytes() == before
    assert not trace.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("", "no step"),
        ("hello\n", "none of a trace"),
        ('{"type": "header", "format": 7}', "7"),
    ],
)
def test_no_trace(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    if text is not None:
        path.write_text(text)
    assert said in refused(run("trace", str(path)))
    assert not path.with_suffix(".html").exists()
