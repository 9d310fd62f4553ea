"""Prompts in the shapes that people have them in, whole and cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import InputError
from specdec.train import prompts
from specdec.train.prompts import Prompt, held_out, read_prompts

ROWS: list[dict[str, Any]] = [
    {"id": "a_0", "conversations": [{"from": "human", "value": "What is a fée?"}, {"from": "gpt", "value": "Magic."}]},
    {"id": "b_1", "conversations": [{"from": "gpt", "value": "continued"}, {"from": "human", "value": "and then"}]},
    {"id": "c_0", "conversations": []},
    {"id": "d_0", "conversations": [{"from": "human", "value": 'Tell me "more" about ]}, please — été'}]},
]


def found(source: Path | str) -> list[tuple[str, str]]:
    return [(p.text, p.response) for p in read_prompts(str(source))]


def written(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize("at_once", [3, 7, 1 << 20])
def test_an_array_is_streamed_and_may_be_cut_off_anywhere(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are whole are read, wherever the file ends: in a string, in a character, between rows."""
    monkeypatch.setattr(prompts, "_READ_CHARS", at_once)
    whole = json.dumps(ROWS, ensure_ascii=False, indent=1).encode()
    both = [("What is a fée?", "Magic."), ('Tell me "more" about ]}, please — été', "")]
    assert found(written(tmp_path, "a.json", whole)) == both
    assert found(written(tmp_path, "a.json", b"\xef\xbb\xbf" + whole)) == both
    in_string = whole.rindex(b"please") + 3
    in_character = whole.rindex("é".encode()) + 1
    behind_a_row = whole.index(b"b_1")
    for end in (in_string, in_character, behind_a_row):
        assert found(written(tmp_path, "a.json", whole[:end])) == both[:1]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_lines_and_tables(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    rows = [{"prompt": "Count to three", "response": "1 2 3"}, {"prompt": "  ", "response": ""}, {"prompt": "Hello"}]
    if name.endswith("parquet"):
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert found(path) == [("Count to three", "1 2 3"), ("Hello", "")]


def test_every_shape_of_a_row(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief"}
    rows: list[Any] = [
        {"messages": [system, {"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]},
        {"conversation": [{"role": "user", "content": "two"}, {"role": "user", "content": "again"}]},
        {"turns": ["three", "four"]},
        {"instruction": "five", "output": "5"},
        {"question": "six", "answer": "6"},
        {"text": "seven"},
        {"turns": []},
        {"text": 8},
        {"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "nine"}]},
        {"messages": ["no turn"]},
        "a string",
        None,
        {"text": " Seven  "},  # an earlier one
        {"instruction": "eight", "input": "a text", "output": "8"},
        {"instruction": "eight", "input": "another text", "output": "8"},
        {"text": "nine \ud800"},
    ]
    path = written(tmp_path, "a.json", json.dumps(rows))
    first = [("one", "1"), ("two", ""), ("three", ""), ("five", "5"), ("six", "6"), ("seven", "")]
    more = [("eight\n\na text", "8"), ("eight\n\nanother text", "8"), ("nine \ufffd", "")]
    assert found(path) == first + more
    assert next(iter(read_prompts(str(path)))).messages == (system, {"role": "user", "content": "one"})


def test_prompts_without_letters_differ(tmp_path: Path) -> None:
    rows = [{"text": t} for t in ("2 + 2 = ?", "3 * 7 = ?", "2 + 2 = ?")]
    assert found(written(tmp_path, "a.json", json.dumps(rows))) == [("2 + 2 = ?", ""), ("3 * 7 = ?", "")]


def test_prompts_that_begin_alike_differ_and_stay_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    same = "please answer the following question about these numbers with care and in one short sentence only: "
    rows: list[Any] = [{"text": f"{same}{i}"} for i in range(40)]
    system = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": f"{same}0"}]
    with caplog.at_level("INFO", "specdec"):
        kept = list(
            read_prompts(str(written(tmp_path, "a.json", json.dumps([*rows, {"messages": system}, rows[3], 1]))))
        )
    assert len({p.key for p in kept}) == len(kept) == 41
    assert "2 of 43 rows left out: 1 as duplicates, 1 without a prompt's text" in caplog.text
    assert len({p.key[:8] for p in kept}) == 1  # what decides the split


def test_the_held_out_split_depends_on_the_prompt_alone(tmp_path: Path) -> None:
    rows = [{"text": f"prompt {'abcdefghij'[i % 10]} {'klmnopqrst'[i // 10]}"} for i in range(100)]
    forward = list(read_prompts(str(written(tmp_path, "a.json", json.dumps(rows)))))
    backward = list(read_prompts(str(written(tmp_path, "b.json", json.dumps(rows[::-1][:50])))))
    split = {p.key: held_out(p, 0.3) for p in forward}
    assert len(split) == 100 and 15 <= sum(split.values()) <= 45
    assert all(split[p.key] == held_out(p, 0.3) for p in backward)
    assert not any(held_out(p, 0.0) for p in forward) and all(held_out(p, 1.0) for p in forward)
    # a larger share holds out the smaller one's prompts too
    assert all(held_out(p, 0.5) for p in forward if split[p.key])
    assert held_out(Prompt("0" * 16, ()), 0.01)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[]", "none of its 0 rows holds a prompt"),
        ("a.json", '[{"other": 1}, {"text": ""}]', "none of its 2 rows holds a prompt; a row needs a text under"),
        ("a.json", '[{"text": "x"}, {"text": y}, {"text": "z"}]', "damaged at character 25, in row 1: Expecting value"),
        ("a.json", '[{"text": "x"} "y" [], {"text": "x" "z"}]', "damaged at character 36, in row 3"),
        ("a.json", '[{"text": ' + "[" * 100_000, "row 0 is nested too deeply"),
        ("a.jsonl", "", "it is empty"),
        ("a.json", '{"text": "x"}', "must hold an array of rows; one row per line is .jsonl"),
        ("a.json", "", "must hold an array"),
        ("a.jsonl", "{not json", "cannot be read"),
    ],
)
def test_sources_without_prompts_say_so(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        found(written(tmp_path, name, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.json.*there is no such file"):
        found(tmp_path / "nothing.json")
