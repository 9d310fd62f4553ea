"""What is around every measurement: a result is written even if it cannot be shown."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import ConfigError
from specdec.eval.entry import markdown_table, run_and_write


def test_a_result_that_cannot_be_shown_is_written(tmp_path: Path) -> None:
    def show(result: dict[str, Any]) -> None:
        raise UnicodeEncodeError("ascii", "é", 0, 1, "no such character")

    config = SimpleNamespace(output=str(tmp_path / "deep" / "it.json"))
    with pytest.raises(UnicodeEncodeError):
        run_and_write(config, "it", lambda _: {"figure": 1}, show)
    assert json.loads((tmp_path / "deep" / "it.json").read_text()) == {"figure": 1}


def test_bad_input_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(config: Any) -> dict[str, Any]:
        raise ConfigError("repeats=0; allowed: at least 1")

    with pytest.raises(SystemExit) as ended:
        run_and_write(SimpleNamespace(output=str(tmp_path / "it.json")), "it", measure, print)
    assert ended.value.code == 2
    assert "repeats=0" in capsys.readouterr().err
    assert not (tmp_path / "it.json").exists()


def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output, said in (("/dev/null/x", "output=/dev/null cannot be written to ("), (tmp_path, "is a folder")):
        with pytest.raises(SystemExit) as ended:
            run_and_write(SimpleNamespace(output=str(output)), "it", lambda _: pytest.fail("measured"), print)
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert said in shown and shown.count("\n") == 1


def test_names_cannot_break_a_table() -> None:
    assert markdown_table([["a", "b"], ["x|y", "two\nlines"]]) == "| a | b |\n| --- | --- |\n| x\\|y | two lines |\n"
