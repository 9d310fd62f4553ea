"""Answers in Spec-Bench's format: its fields, its counts, its order."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec import ConfigError, InputError
from specdec.eval import spec_bench_format
from specdec.eval.records import Case, Dropped, End, Header, Records, RecordWriter, RequestRecord, Sample, VariantInfo
from specdec.eval.spec_bench_format import write_all, write_answers

CASES = [
    Case("300", "summarization", 0, 9, 3),
    Case("95", "mt_bench", 1, 8, 3),
    Case("95", "mt_bench", 0, 5, 4),
    Case("poem", "other", 0, 5, 2),
]
# emissions and steps of each case's answer
ANSWERS = [
    ([[0.1, 1], [0.4, 2]], [[4, 4, 1, 2]]),
    ([[0.1, 1], [0.2, 1], [0.5, 1]], [[4, 4, 0, 1], [0, 0, 0, 1]]),
    ([[0.1, 1], [0.6, 3]], [[4, 4, 2, 3]]),
    ([[0.3, 2]], []),
]


class Words:
    """A tokenizer whose token 0 is special."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " " + " ".join(f"w{i}" for i in ids if i)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()


def records() -> Records:
    variants = [VariantInfo("none", "engine"), VariantInfo("ngram", "engine", max_draft_tokens=4)]
    header = Header("p", "smollm2", "float32", 1, 1, 1, 8, 0.0, None, 2, variants, CASES)
    samples = []
    for repeat in range(2):
        for case, (emissions, steps) in enumerate(ANSWERS):
            ids = [*range(1, int(CASES[case].num_new_tokens or 0)), 0]
            slower = [[at * (1 + repeat), tokens] for at, tokens in emissions]
            request = RequestRecord(case, ids, "length", slower, steps)
            samples.append(Sample("ngram", case, repeat, 0, 0.0, [request]))
    return Records(header, None, samples, End(8, 1.0, 0.0))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_per_conversation_with_the_first_repeats_figures(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ngram.jsonl"
    assert write_answers(records(), "ngram", path, Words(), "ours") == 3
    found = lines(path)
    assert [line["question_id"] for line in found] == [95, 300, "poem"]
    assert [line["category"] for line in found] == ["roleplay", "summarization", "other"]  # 95 is MT-bench's second ten
    assert {line["model_id"] for line in found} == {"ours"}
    assert found[0]["choices"] == [
        {
            "index": 0,
            "turns": ["w1 w2 w3", "w1 w2"],
            "decoding_steps": [2, 3],
            "new_tokens": [4, 3],
            "wall_time": [0.6, 0.5],
            "accept_lengths": [1, 3, 1, 1, 1],
        }
    ]
    for line in found:
        choice = line["choices"][0]
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
        assert {"answer_id", "tstamp"} <= set(line)


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    whole = records()
    with pytest.raises(ConfigError, match="no variant 'suffix'; it has: none, ngram"):
        write_answers(whole, "suffix", tmp_path / "x", Words(), "x")
    with pytest.raises(InputError, match=r"none has not answered 4 of 4 prompts \(300 first\)"):
        write_answers(whole, "none", tmp_path / "x", Words(), "x")
    batched = replace(whole, header=replace(whole.header, batch_size=4))
    with pytest.raises(InputError, match="batch_size=4"):
        write_answers(batched, "ngram", tmp_path / "x", Words(), "x")


def test_all_variants_and_the_tokenizer_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_bench_format, "load_tokenizer_of", lambda target: Words())
    whole = records()
    header = replace(whole.header, variants=[VariantInfo("a/b c", "engine"), VariantInfo("openvino", "peer")])
    run = tmp_path / "run"
    run.mkdir()
    with RecordWriter(run / "records.jsonl") as writer:
        writer.write(header)
        writer.write(Dropped("openvino", "out of luck"))
        for sample in whole.samples:
            writer.write(replace(sample, variant="a/b c"))
    with pytest.raises(InputError, match="was not measured to its end"):
        write_all(run, tmp_path / "out")
    with RecordWriter(run / "records.jsonl") as writer:
        writer.write(End(8, 1.0, 0.0))
    assert write_all(run, tmp_path / "out") == {"a_b_c.jsonl": 3}
    assert (tmp_path / "out" / "tokenizer").is_dir()


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["spec_bench_format", *words])
    with pytest.raises(SystemExit) as ended:
        spec_bench_format.main()
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    return line


def test_the_command_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "run=None; needed: run=FOLDER" in refused(monkeypatch, capsys)
    assert "run=[1]; needed: run=FOLDER" in refused(monkeypatch, capsys, "run=[1]", "out_dir=x")
    assert "out_dir=/dev/null/x cannot be written" in refused(monkeypatch, capsys, "run=a", "out_dir=/dev/null/x")

    def fail(*_: Any) -> None:
        raise OverflowError("[/x] out of range")

    monkeypatch.setattr(spec_bench_format, "write_all", fail)
    line = refused(monkeypatch, capsys, "run=a", "out_dir=x")
    assert "the records of a do not fit together (OverflowError: [/x] out of range)" in line


def test_variants_of_one_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_bench_format, "load_tokenizer_of", lambda target: Words())
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        variants = [VariantInfo("a/b", "engine"), VariantInfo("a b", "engine")]
        writer.write(replace(records().header, variants=variants))
        writer.write(End(0, 1.0, 0.0))
    with pytest.raises(InputError, match="'a/b', 'a b' would share a file"):
        write_all(tmp_path, tmp_path / "out")
