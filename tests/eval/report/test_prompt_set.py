from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.eval.report.gather import gather
from specdec.eval.report.prompt_set import prompts_needed
from specdec.eval.report.tables import settings
from tests.eval.report.made_up import VARIANTS, Made, write_point

SMALL = Made(repeats=1, num_tokens=12, num_cases=2, variants=(VARIANTS[0], VARIANTS[2]))
FILE = {"path": "pkg://specdec.eval/data/small_prompts.jsonl", "limit": 8, "split": "train", "texts": None}


@pytest.mark.parametrize(
    ("prompts", "overrides", "expected"),
    [
        (FILE, {}, "small_prompts.jsonl, limit=8"),
        (
            {"path": "rows/question.jsonl", "limit": None, "max_turns": 1, "chat": False, "groups": {"all": ["qa"]}},
            {"prompts": "spec_bench", "prompts.path": "rows/question.jsonl"},
            "spec_bench: question.jsonl, max_turns=1, chat=False",
        ),
        ({"texts": ["a", "b"], "instruction": "x" * 80}, {}, f"2 texts, instruction={'x' * 39}…"),
        ({"path": "openai/gsm8k", "columns": {"prompt": "question"}}, {}, "gsm8k, columns.prompt=question"),
        (None, {"prompts": "mine"}, "mine: not known"),
        (None, {}, "not known"),
        ([1], {}, "not known"),
        ({"path": 3}, {}, "not known"),
    ],
)
def test_a_prompt_set_is_told_by_its_name_file_and_what_is_set(
    tmp_path: Path, prompts: Any, overrides: dict[str, Any], expected: str
) -> None:
    made = replace(SMALL, prompts=prompts, overrides=overrides, digests="a")
    point = gather([write_point(tmp_path / "run", made)]).points[0]
    assert point.prompts.settings == expected
    table = settings([point])
    (row,) = table.rows
    cells = dict(zip(table.columns, row, strict=True))
    assert cells["prompt set"] == f"{expected}; digest {point.prompts.digest}"
    assert (cells["conversations"], cells["prompts"]) == ("2", "2")


def test_records_without_digests_or_a_config_are_read(tmp_path: Path) -> None:
    run = write_point(tmp_path / "run", SMALL)
    (run / "config.yaml").unlink()
    (row,) = settings(gather([run]).points).rows
    assert "not known; digest not known" in row


def test_other_prompts_are_warned_of(tmp_path: Path) -> None:
    runs = [
        write_point(tmp_path / name, replace(SMALL, name=name, prompts=FILE, digests=digests))
        for name, digests in (("a", "x"), ("b", "x"), ("c", "y"))
    ]
    assert gather(runs[:2]).warnings == []
    (warning,) = gather(runs).warnings
    assert warning.startswith("The points differ in the prompts: small_prompts.jsonl, limit=8 (2 conversations, 2")
    assert len(set(warning.rstrip(".").split("; "))) == 2


def test_prompts_that_a_sweep_sets_are_no_difference(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_point(tmp_path / "sweep" / name, replace(SMALL, name=name, digests=name, overrides={"prompts": name}))
    assert gather([tmp_path / "sweep"]).warnings == []
    apart = gather([tmp_path / "sweep" / "x", tmp_path / "sweep" / "y"]).warnings  # two runs, compared all the same
    assert len(apart) == 1
    write_point(tmp_path / "sweep" / "z", replace(SMALL, name="z", digests="other", overrides={"prompts": "x"}))
    assert "differ in the prompts" in gather([tmp_path / "sweep"]).warnings[0]  # one setting, two sets


def test_later_turns_may_follow_other_answers_where_the_sweep_asks_for_them(tmp_path: Path) -> None:
    for name in ("0.0", "1.0"):
        made = replace(SMALL, name=name, digests=name, temperature=float(name), overrides={"temperature": float(name)})
        write_point(tmp_path / name, made)
    assert gather([tmp_path]).warnings == []


@pytest.mark.parametrize(
    ("batch_size", "level", "expected"),
    [(1, 0.95, "6 conversations"), (8, 0.95, "48 prompts"), (16, 0.99, "128 prompts")],
)
def test_how_many_prompts_an_interval_takes(tmp_path: Path, batch_size: int, level: float, expected: str) -> None:
    point = gather([write_point(tmp_path / "run", replace(SMALL, batch_size=batch_size, num_cases=16))]).points[0]
    assert prompts_needed(point.records.header, level) == expected
