from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.errors import InputError
from specdec.eval.records import ERROR, PROVENANCE, RECORDS
from specdec.eval.report.gather import gather
from tests.eval.report.made_up import ORIGIN, VARIANTS, Made, write_point

SMALL = Made(repeats=1, num_tokens=12, num_cases=2, variants=(VARIANTS[0], VARIANTS[2]))


def test_points_are_found_at_any_depth_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_point(tmp_path / "sweep" / "deep" / str(number), Made(f"p{number}", variants=SMALL.variants))
    found = gather([tmp_path, tmp_path / "sweep"])
    assert [point.label for point in found.points] == ["p1", "p2", "p10"]  # and each once
    assert found.warnings == []


def test_points_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_point(tmp_path / name, replace(SMALL, name="k=4,p=a")) for name in ("a", "b")]
    assert [point.label for point in gather(runs).points] == ["k=4,p=a", f"k=4,p=a ({runs[1]})"]


def test_a_single_run_has_the_name_of_its_folder(tmp_path: Path) -> None:
    runs = [write_point(tmp_path / name / "run", SMALL) for name in ("a", "b")]
    assert [point.label for point in gather(runs).points] == ["run", f"run ({runs[1]})"]


def test_names_in_a_row_are_told_apart(tmp_path: Path) -> None:
    for name in ("k=1,p=a", "k=2,p=a"):
        write_point(tmp_path / name, replace(SMALL, name=name, is_finished=False))
    assert gather([tmp_path]).warnings == ["Not finished, used as far as it goes: k=1,p=a; k=2,p=a."]


def test_a_drafter_that_drew_trees_once_is_one_of_trees_everywhere(tmp_path: Path) -> None:
    """A draft of one token is no tree by its numbers; its rate must not change its column from point to point."""
    variants = (VARIANTS[0], VARIANTS[4], VARIANTS[2])
    runs = [
        write_point(tmp_path / str(count), replace(SMALL, variants=variants, draft_tokens=count)) for count in (1, 12)
    ]
    alone, both = gather(runs[:1]).points, gather(runs).points
    assert [p.summary["variants"]["eagle3"]["tree"] for p in alone] == [False]
    assert [p.summary["variants"]["eagle3"]["tree"] for p in both] == [True, True]
    assert [p.summary["variants"]["ngram"]["tree"] for p in both] == [False, False]


def test_an_unfinished_point_is_used_and_said(tmp_path: Path) -> None:
    run = write_point(tmp_path / "run", SMALL)
    lines = (run / RECORDS).read_text().splitlines()
    (run / RECORDS).write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:40])
    found = gather([run])
    assert not found.points[0].is_finished
    assert found.warnings == ["Not finished, used as far as it goes: run."]


def test_what_cannot_be_used_is_listed_with_the_reason(tmp_path: Path) -> None:
    good = write_point(tmp_path / "good", SMALL)
    corrupt = write_point(tmp_path / "corrupt", SMALL)
    lines = (corrupt / RECORDS).read_text().splitlines()
    (corrupt / RECORDS).write_text("\n".join([*lines[:3], "{]", *lines[3:]]) + "\n")
    failed = write_point(tmp_path / "failed", Made(is_finished=False, variants=SMALL.variants))
    (failed / ERROR).write_text(json.dumps({"error": "OutOfMemoryError", "message": "no room", "traceback": []}))
    only_error = tmp_path / "only_error"
    only_error.mkdir()
    (only_error / ERROR).write_text(json.dumps({"error": "ConfigError", "message": "batch_size=0"}))
    nothing_yet = write_point(tmp_path / "header_only", SMALL)
    (nothing_yet / RECORDS).write_text(lines[0] + "\n")
    misfit = write_point(tmp_path / "misfit", SMALL)
    (misfit / RECORDS).write_text((misfit / RECORDS).read_text().replace('"case":1', '"case":99'))
    (empty := tmp_path / "empty").mkdir()

    found = gather([good, corrupt, failed, only_error, nothing_yet, misfit, empty])
    assert [point.folder for point in found.points] == [good]
    reasons = {entry.folder.name: entry.reason for entry in found.unused}
    assert reasons.keys() == {"corrupt", "failed", "only_error", "header_only", "misfit", "empty"}
    assert "line 4 is corrupt" in reasons["corrupt"]
    assert reasons["failed"] == "failed: OutOfMemoryError: no room"
    assert reasons["only_error"] == "failed: ConfigError: batch_size=0"
    assert "nothing was measured" in reasons["header_only"]
    assert "case 99 of 2" in reasons["misfit"]
    assert "no records.jsonl" in reasons["empty"]
    assert any(str(corrupt) in warning for warning in found.warnings)


def test_an_error_of_an_earlier_session_does_not_hide_a_finished_point(tmp_path: Path) -> None:
    run = write_point(tmp_path / "run", SMALL)
    (run / ERROR).write_text("{}")
    assert len(gather([run]).points) == 1


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing to report: .*no records\.jsonl"):
        gather([tmp_path])
    with pytest.raises(InputError, match="is no folder"):
        gather([tmp_path / "absent"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"git_sha": "f" * 40}, "the code (git SHA): 0123456789ab; ffffffffffff"),
        ({"git_dirty": True}, "uncommitted changes (git dirty): False; True"),
        ({"cpu": "Another"}, "the CPU: A made-up CPU @ 3.0 GHz; Another"),
        ({"gpu": "A GPU"}, "the GPU: not known; A GPU"),
        ({"num_threads": 8}, "the number of threads: 2; 8"),
        ({"versions": ORIGIN["versions"] | {"torch": "2.11.0"}}, "the version of torch: 2.13.0; 2.11.0"),
        ({"resumed": [ORIGIN | {"num_threads": 1}]}, "the number of threads: 2; 1"),
    ],
)
def test_different_origins_are_named(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    runs = [write_point(tmp_path / "a", SMALL), write_point(tmp_path / "b", SMALL, change)]
    assert gather(runs).warnings == [f"The points differ in {expected}."]


def test_no_origin_and_no_config_are_no_obstacle(tmp_path: Path) -> None:
    run = write_point(tmp_path / "run", SMALL)
    (run / PROVENANCE).write_text("{")
    (run / "config.yaml").unlink()
    point = gather([run]).points[0]
    assert not any(point.provenance.values())
    assert point.setting("engine.max_draft_tokens") is None


def test_a_setting_comes_from_the_command_line_the_header_or_the_config(tmp_path: Path) -> None:
    made = Made(batch_size=2, draft_tokens=7, overrides={"engine.kv_dtype": "int8"}, variants=SMALL.variants)
    point = gather([write_point(tmp_path / "run", made)]).points[0]
    assert point.setting("engine.kv_dtype") == "int8"
    assert point.setting("batch_size") == 2
    assert point.setting("engine.max_draft_tokens") == 7
    assert point.setting("engine.max_draft_tokens.deeper") is None
