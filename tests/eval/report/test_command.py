from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.running import run
from tests.eval.report.made_up import VARIANTS, Made, write_point

SMALL = Made(repeats=1, num_tokens=8, num_cases=2, variants=(VARIANTS[0], VARIANTS[2]))


def test_it_prints_the_headline_and_the_path_and_warns_on_standard_error(tmp_path: Path) -> None:
    runs = [write_point(tmp_path / "a", SMALL), write_point(tmp_path / "b", SMALL, {"num_threads": 8})]
    (tmp_path / "empty").mkdir()
    done = run("report", *map(str, runs), str(tmp_path / "empty"), "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "ngram" in done.stdout
    assert done.stdout.replace("\n", "").endswith(str(tmp_path / "out" / "index.html"))
    assert (tmp_path / "out" / "index.html").is_file()
    errors = done.stderr.replace("\n", " ")
    assert "the number of threads: 2; 8" in errors
    assert "no records.jsonl" in errors
    assert "the number of threads: 2; 8" in (tmp_path / "out" / "index.html").read_text()


def test_without_a_folder_it_writes_into_the_first_run_and_can_do_so_again(tmp_path: Path) -> None:
    folder = write_point(tmp_path / "a", SMALL)
    first, second = (run("report", str(folder)) for _ in range(2))
    assert first.exit_code == second.exit_code == 0
    assert (folder / "report" / "index.html").is_file()
    assert not list((folder / "report").glob(".*"))


def test_names_are_not_markup_in_a_terminal(tmp_path: Path) -> None:
    odd = replace(VARIANTS[2], name="[b]x")
    folder = write_point(tmp_path / "[red]a", replace(SMALL, variants=(VARIANTS[0], odd)))
    (tmp_path / "[bold]b").mkdir()
    done = run("report", str(folder), str(tmp_path / "[bold]b"), "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "[b]x" in done.stdout
    assert "[red]a" in done.stdout
    assert "[bold]b" in done.stderr


@pytest.mark.parametrize("what", ["absent", "empty", "corrupt"])
def test_nothing_usable_is_one_line_and_2(tmp_path: Path, what: str) -> None:
    folder = tmp_path / what
    if what != "absent":
        folder.mkdir()
    if what == "corrupt":
        (folder / "records.jsonl").write_text("no json\n")
    done = run("report", str(folder))
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert str(folder) in done.stderr


def test_a_place_that_cannot_be_written_is_one_line_and_2(tmp_path: Path) -> None:
    folder = write_point(tmp_path / "a", SMALL)
    done = run("report", str(folder), "-o", str(folder / "config.yaml" / "report"))
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
