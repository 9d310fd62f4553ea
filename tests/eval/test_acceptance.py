"""Fault 27: acceptance of a scripted run on a model whose every answer, loops included, is known by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec import ConfigError
from specdec.eval import acceptance
from specdec.eval.point import measure_point
from specdec.eval.prompts import stratify
from specdec.eval.ratios import micro_interval
from specdec.eval.records import Case, Records, RequestRecord, read_records
from specdec.eval.summary import acceptance as acceptance_of
from specdec.eval.summary import summarise
from tests.eval.known_model import config_for, save_known_model
from tests.eval.made_samples import header


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def folder(known: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("point")
    measure_point(config_for("acceptance", known, "batch_size=2"), folder)
    return folder


@pytest.fixture
def records(folder: Path) -> Records:
    return read_records(folder / "records.jsonl")


def counts(view: dict[str, Any]) -> tuple[int, int, int, int]:
    return tuple(view[f"num_{name}"] for name in ("steps", "draft_tokens", "accepted_tokens", "emitted_tokens"))  # type: ignore[return-value]


def test_fault_27_every_number_is_known(records: Records) -> None:
    # A and B: 29 tokens after prefill's as (3 + 1 + 2) x 4 + 3 + 1 + 1. Of the last two steps one may draft a single
    # token and the other none: what is drafted is never more than what may be emitted.
    # C: 3 + 1, then EOS is the accepted draft token, so no next token counts: 5 in 3 steps.
    # A repeats itself at token 9 = prefill's, 3, 1, 2 and two of the three tokens of step 4.
    summary = summarise(records)
    whole = summary["variants"]["scripted"]
    answers = [request for sample in records.of("scripted") for request in sample.requests]
    by_category = {
        name: acceptance_of(records.header, [a for a in answers if records.header.cases[a.case].category == name])
        for name in ("loop", "free")
    }
    loop, free = by_category["loop"], by_category["free"]
    assert set(summary["categories"]) == {"loop", "free"}
    assert counts(loop) == (15, 53, 14, 29)
    assert counts(loop["cut"]) == (4, 16, 5, 8)
    assert counts(loop["no_loops"]) == (0, 0, 0, 0)
    assert loop["no_loops"]["acceptance_length"] is None
    for view in (free, free["cut"], free["no_loops"]):
        assert counts(view) == (15 + 3, 53 + 12, 14 + 3, 29 + 5)
    assert (whole["num_answers"], whole["num_loops"]) == (3, 1)
    assert counts(whole["cut"]) == (22, 81, 22, 42)
    assert whole["cut"]["acceptance_length"] == pytest.approx(42 / 22)
    assert whole["acceptance_length"] == pytest.approx(63 / 33)
    assert whole["no_loops"]["acceptance_length"] == pytest.approx(34 / 18)
    assert whole["cut"]["acceptance_rate"] == pytest.approx(22 / 81)
    # Accepted at depth 1 in 3 + 9 + 2 steps of 22, at depth 2 in 2 + 5 + 1; one of the 22 steps drafted nothing.
    assert whole["cut"]["acceptance_at_unconditional"] == pytest.approx([14 / 22, 8 / 22, 0, 0])
    assert whole["cut"]["acceptance_at_conditional"] == [pytest.approx(14 / 21), pytest.approx(8 / 14), 0, None]
    assert whole["cut"]["acceptance_length_interval"] is None  # three prompts say too little about others
    part = summary["categories"]["free"]["scripted"]
    assert (part["num_answers"], part["num_loops"]) == (2, 0)
    assert part["acceptance_length"] == pytest.approx(34 / 18)
    assert summary["identity"]["scripted"] == {"equal": 3, "of": 3, "parted": []}
    # The baseline takes a step per token after prefill's, and drafts nothing.
    assert counts(summary["variants"]["none"]) == (29 + 29 + 5, 0, 0, 63)
    assert summary["variants"]["none"]["acceptance_rate"] is None


def test_answers_prompts_and_what_was_left_out_are_named(records: Records) -> None:
    requests = [request for sample in records.of("scripted") for request in sample.requests]
    cases = records.header.cases
    assert [(cases[r.case].name, r.cut, len(r.token_ids), r.finish_reason) for r in requests] == [
        ("7", 9, 30, "length"),
        ("8", None, 30, "length"),
        ("10", None, 6, "stop"),
    ]
    (left,) = records.header.left_out
    assert (left.name, left.category, left.num_tokens) == ("9", "long", 30)
    assert "max_prompt_tokens=20" in left.reason
    info = records.header.variants[1]
    assert (info.name, info.verifier, info.max_draft_tokens) == ("scripted", "match", 4)


def run(known: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> bool:
    """Return what the command's verdict is."""

    def measured(config: Any, console: Any) -> tuple[Records, dict[str, Any]]:
        records = measure_point(config, folder)
        return records, summarise(records)

    monkeypatch.setattr(acceptance, "run_point", measured)
    return acceptance.measure(config_for("acceptance", known, *overrides))


def test_tables_and_check(
    known: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(known, folder, monkeypatch, "batch_size=2")
    shown = capsys.readouterr().out
    assert "left out: 1 of long (9): prompts.max_prompt_tokens=20" in shown
    assert "3 of 3 answers of scripted have the undrafted run's ids" in shown


def test_check_finds_what_is_not_the_targets(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = ["verifier=synthetic", "drafter=random"]
    assert run(known, tmp_path, monkeypatch, *lossy)  # a lossy rule may
    assert "DIFFERENT" in capsys.readouterr().out
    text = (tmp_path / "records.jsonl").read_text()
    (tmp_path / "records.jsonl").write_text(text.replace('"lossless":false', '"lossless":true'))
    assert not run(known, tmp_path, monkeypatch, *lossy)


def test_sampled_runs_and_draft_length(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = ["temperature=1.0", "seed=3", "verifier=rejection", "engine.max_draft_tokens=2", "prompts.limit=1"]
    assert run(known, tmp_path, monkeypatch, "drafter=random", *sampled)
    records = read_records(tmp_path / "records.jsonl")
    info = records.header.variants[1]
    assert (info.verifier, info.max_draft_tokens, len(records.header.cases)) == ("rejection", 2, 1)
    assert summarise(records)["variants"]["random"]["cut"]["acceptance_length"] >= 1


def test_cut_at_every_token() -> None:
    # prefill's token, then 3 = 2 drafted + next, then 2 of 2 drafted before a stop
    whole = RequestRecord(0, list(range(6)), "stop", [[0.1, 1], [0.2, 3], [0.3, 2]], [[4, 4, 2, 3], [2, 2, 2, 2]])
    expected = {1: (0, 0, 0), 2: (1, 1, 1), 3: (1, 2, 2), 4: (1, 2, 3), 5: (2, 3, 4), 6: (2, 4, 5)}
    for num_tokens, (steps, accepted, emitted) in expected.items():
        stats = whole.stats(num_tokens)
        assert (stats.num_steps, stats.num_accepted_tokens, stats.num_emitted_tokens) == (steps, accepted, emitted)
    assert whole.stats() == whole.stats(6)


def test_answers_without_decode_steps() -> None:
    found = acceptance_of(header([Case("0", "free", 0, 1)]), [RequestRecord(0, [1], "stop", [[0.1, 1]], [])])
    assert found["cut"]["acceptance_length"] is None
    assert found["cut"]["acceptance_length_interval"] is None


def test_a_limit_is_dealt_to_the_categories() -> None:
    categories = [*"aaaaaaaa", *"bb", *"cccc"]
    assert stratify(categories, 3) == [0, 8, 10]
    assert stratify(categories, 9) == [0, 2, 4, 6, 8, 9, 10, 11, 12]  # a: 4 of 8, b: both, c: 3 of 4
    assert stratify([*"abcdefghijklm"], 8) == [0, 1, 3, 4, 6, 8, 9, 11]  # not the first eight, which are alike
    assert stratify([*"aabbccdd"], 6) == [0, 1, 2, 4, 5, 6]  # one of each, and one more of a and of c
    assert stratify(categories, None) == stratify(categories, 99) == list(range(14))
    with pytest.raises(ConfigError, match="limit=0"):
        stratify(categories, 0)


def test_micro_interval_resamples_pairs() -> None:
    assert micro_interval([(4.0, 2.0)] * 7) is None
    assert micro_interval([(4.0, 2.0)] * 8) == (2.0, 2.0)
    found = micro_interval([(1.0, 1.0), (30.0, 10.0)] * 4)
    assert found is not None
    assert 1.0 < found[0] < 124 / 44 < found[1] < 3.0  # no further out than the pairs' own ratios


def test_repeats_and_turns_are_no_news() -> None:
    cases = [Case(str(i // 2), "free", i % 2, 1) for i in range(16)]  # eight conversations of two turns
    steps = [[[4, 4, i % 4, i % 4 + 1]] * (1 + i % 3) for i in range(16)]
    once = [
        RequestRecord(i, [0] * (1 + sum(s[3] for s in own)), "length", [[0.1, 1]], own) for i, own in enumerate(steps)
    ]
    found = acceptance_of(header(cases), once)["cut"]["acceptance_length_interval"]
    assert found is not None
    assert acceptance_of(header(cases), once * 9)["cut"]["acceptance_length_interval"] == found


def test_spec_bench_reports_mt_bench_as_one(known: Path, tmp_path: Path) -> None:
    rows = [{"category": c, "turns": ["ab"]} for c in ("writing", "stem", "qa")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = ["prompts=spec_bench", f"prompts.path={tmp_path}/p.jsonl", "prompts.max_prompt_tokens=20"]
    records = measure_point(config_for("acceptance", known, *settings, "max_new_tokens=3"), tmp_path / "out")
    assert [(c.name, c.category) for c in records.header.cases] == [("0", "mt_bench"), ("1", "mt_bench"), ("2", "qa")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompts.max_prompt_tokens=0", "max_prompt_tokens=0"),
        ("batch_size=0", "batch_size=0"),
        ("repeats=0", "repeats=0"),
        ("max_new_tokens=1", "max_new_tokens=1"),
        ("prompts.limit=0", "limit=0"),
        ("prompts.max_words=0", "none of the 4 prompts can be run.*max_words=0"),
        ("context_tokens=0", "context_tokens=0"),
        ("context_tokens=100000", "context_tokens=100000"),
    ],
)
def test_bad_settings_are_refused(known: Path, tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_point(config_for("acceptance", known, override), tmp_path)
