"""One odd folder costs that folder, never the report: it is used, or listed with the reason."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import InputError
from specdec.eval.records import PROVENANCE, RECORDS, read_records
from specdec.eval.report import page
from specdec.eval.report.gather import gather
from specdec.eval.report.page import write_report
from specdec.eval.summary import summarise
from tests.cli.running import run
from tests.eval.report.made_up import ORIGIN, VARIANTS, Made, write_point

SMALL = Made(repeats=1, num_tokens=6, num_cases=2, variants=(VARIANTS[0], VARIANTS[2]))
ODD = (None, True, -1, 0, 0.5, 3, "x", "", "\ud800", [], {}, [None], [[]], {"a": 1}, math.nan, math.inf, 1e300, 10**30)
Lines = list[dict[str, Any]]


def lines_of(folder: Path) -> Lines:
    return [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]


def write_lines(folder: Path, lines: Lines) -> None:
    (folder / RECORDS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every part of a value of JSON."""
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(part, dict | list):
            yield from places(part)


def mutate(lines: Lines, dice: random.Random) -> None:
    """Change one thing: drop a key or a line, put something else in its place, or say something twice."""
    if dice.random() < 0.1:
        number = dice.randrange(len(lines))
        dice.choice([lambda: lines.pop(number), lambda: lines.append(lines[number])])()
        return
    container, key = dice.choice(list(places(dice.choice(lines))))
    how = dice.randrange(4)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, list):
        container.append(container[key])
    else:
        container[key] = dice.choice(ODD)


def test_any_change_of_a_record_is_used_or_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, dice = 300, random.Random(20260102)
    good = lines_of(write_point(tmp_path / "all" / "good", SMALL))
    for number in range(count):
        lines = json.loads(json.dumps(good))
        mutate(lines, dice)
        folder = tmp_path / "all" / str(number)
        folder.mkdir()
        write_lines(folder, lines)
    found = gather([tmp_path / "all"])
    assert len(found.points) + len(found.unused) == count + 1
    assert count / 10 < len(found.points) < count / 2
    assert not [entry for entry in found.unused if "do not fit together" in entry.reason]  # no summary met odd records
    monkeypatch.setattr(page, "MOST_POINTS_DRAWN", 8)
    write_report(found, tmp_path / "report")
    assert len(found.points) + len(found.unused) == count + 1
    assert not [entry for entry in found.unused if "its figures" in entry.reason]
    assert found.not_drawn == []


def _first(lines: Lines, kind: str) -> dict[str, Any]:
    return next(line for line in lines if line["type"] == kind)


def _sample(change: Callable[[dict[str, Any]], Any]) -> Callable[[Lines], Any]:
    return lambda lines: change(_first(lines, "sample"))


def _request(change: Callable[[dict[str, Any]], Any]) -> Callable[[Lines], Any]:
    return lambda lines: change(_first(lines, "sample")["requests"][0])


def _header(**changes: Any) -> Callable[[Lines], Any]:
    return lambda lines: lines[0].update(changes)


def _times(*rows: dict[str, Any]) -> Callable[[Lines], Any]:
    return lambda lines: _first(lines, "machine").update(step_times=list(rows))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_times({"runner_s": 1.0}), "without rows"),
        (_times({"rows": 0.0, "runner_s": 1.0}), "without rows"),
        (_times({"rows": 1.0, "runner_s": 0.0}), "of no length"),
        (_times({"rows": 1.0}), "of no length"),
        (_times({"rows": 1.0, "runner_s": "fast"}), "step_times of machine"),
        (_times({"rows": 1.0, "runner_s": 1.0}, {"rows": 1.0, "runner_s": 2.0}), "one number of rows"),
        (lambda lines: lines.append(lines[1]), "a second machine"),
        (lambda lines: lines.append(lines[0]), "a second header"),
        (_header(variants=[]), "no variant"),
        (lambda lines: lines[0]["variants"].append(lines[0]["variants"][0]), "two variants have one name"),
        (_header(overrides=[1]), "overrides of header"),
        (_header(question=3), "question of header"),
        (_header(absent=[{"name": "x"}]), "absent peer"),
        (_header(absent=[{"name": "x", "reason": 1}]), "absent of header"),
        (_header(temperature=math.nan), "temperature of header is nan"),
        (_header(batch_size=True), "batch_size of header is True"),
        (_header(batch_size=0), "batch_size is 0"),
        (_sample(lambda s: s.update(variant="other")), "unknown variant 'other'"),
        (lambda lines: lines.insert(-1, lines[-2]), "a second sample"),
        (_sample(lambda s: s.update(start_s=-1.0)), "start_s is -1.0"),
        (_sample(lambda s: s.update(requests=[])), "without requests"),
        (_sample(lambda s: s["requests"].append(s["requests"][0])), "a case twice"),
        (_request(lambda r: r.update(case=2)), "case 2 of 2"),
        (_request(lambda r: r.update(emissions=[])), "without emissions"),
        (_request(lambda r: r["emissions"].reverse()), "do not rise"),
        (_request(lambda r: r["emissions"][0].pop()), "no pair"),
        (_request(lambda r: r["emissions"][0].__setitem__(0, math.inf)), "emissions of requestrecord"),
        (_request(lambda r: r["token_ids"].pop()), "5 tokens, 6 of them emitted"),
        (_request(lambda r: r.update(steps=[[1, 2, 3]])), "a step that is no"),
        (_request(lambda r: r.update(steps=[[4, 4, -1, 0]])), "a step that is no"),
        (_request(lambda r: r.update(draft_s=-1.0)), "draft_s is -1.0"),
        (_request(lambda r: r.update(prefill_s=100.0)), "s of prefill in"),
    ],
)
def test_a_line_that_cannot_be_is_named(tmp_path: Path, change: Callable[[Lines], Any], said: str) -> None:
    folder = write_point(tmp_path / "run", SMALL)
    lines = lines_of(folder)
    change(lines)
    write_lines(folder, lines)
    with pytest.raises(InputError, match=r"line \d+ is corrupt") as raised:
        read_records(folder / RECORDS)
    assert said in str(raised.value)


def test_an_end_that_counts_other_samples_is_none(tmp_path: Path) -> None:
    folder = write_point(tmp_path / "run", SMALL)
    lines = lines_of(folder)
    write_lines(folder, [*lines[:-2], lines[-1]])
    records = read_records(folder / RECORDS)
    assert records.end is None
    assert summarise(records)["is_complete"] is False
    assert gather([folder]).warnings == [
        "Not finished, used as far as it goes: run.",
        "run is not complete: its end counts 4 samples, 3 are there.",
    ]
    write_lines(folder, [*lines[:-2], lines[-1], lines[-2], lines[-1]])  # measured on from there
    assert gather([folder]).warnings == []


def test_halves_of_surrogate_pairs_do_not_end_the_report(tmp_path: Path) -> None:
    folder = write_point(tmp_path / "run", SMALL)
    lines = lines_of(folder)
    lines[0]["question"] = lines[0]["cases"][0]["category"] = "\ud800 why"
    write_lines(folder, lines)
    (folder / PROVENANCE).write_text(json.dumps({"cpu": "\udfff", "argv": ["\ud800"]}))
    found = gather([folder])
    assert "? why" in write_report(found, tmp_path / "report").read_text()
    assert not found.unused


@pytest.mark.parametrize(
    "origin",
    [
        {"resumed": 3, "versions": [1], "argv": "x", "git_sha": 5, "cpu": {"a": 1}, "num_threads": [2], "time": None},
        {"resumed": [None, {"versions": 1, "resumed": [{}]}], "versions": {"torch": None}, "argv": [1, None]},
        [1],
    ],
)
def test_an_odd_origin_is_no_obstacle(tmp_path: Path, origin: Any) -> None:
    runs = [write_point(tmp_path / name, SMALL) for name in ("a", "b")]
    (runs[0] / PROVENANCE).write_text(json.dumps(origin))
    found = gather(runs)
    write_report(found, tmp_path / "report")
    assert len(found.points) == 2
    assert any(str(ORIGIN["git_sha"])[:12] in warning for warning in found.warnings)


def test_a_point_whose_figures_fail_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_point(tmp_path / name, SMALL) for name in ("a", "b")]

    def fail(point: Any, looks: Any) -> None:
        if point.label == "a":
            raise KeyError("rows")

    monkeypatch.setitem(page._TOPICS, "Speedup", (fail,))
    result = run("report", *map(str, runs), "-o", str(tmp_path / "report"))
    assert result.exit_code == 0, result.output
    assert "its figures cannot be made: KeyError: 'rows'" in result.stderr
    text = (tmp_path / "report" / "index.html").read_text()
    assert "its figures cannot be made" in text
    assert "speedup" in text
    (tmp_path / "b" / RECORDS).unlink()
    result = run("report", *map(str, runs))
    assert result.exit_code == 2
    assert "there is nothing to report" in result.stderr


def test_a_figure_over_all_points_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(page, "predictions", fail)
    found = gather([write_point(tmp_path / "run", SMALL)])
    write_report(found, tmp_path / "report")
    assert found.warnings == ["Figures of predicted speedups cannot be made: ZeroDivisionError: division by zero."]
