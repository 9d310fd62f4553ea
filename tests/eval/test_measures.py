"""The measuring scripts measure what they say: on samples known by hand and on a tiny model, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from rich.console import Console

from specdec import LLM, ConfigError
from specdec.eval import kv_error, lossless, point_run, rollback
from specdec.eval.batch_run import BatchRun, over
from specdec.eval.point import measure_point
from specdec.eval.point_view import show_point, show_step_times
from specdec.eval.prompts import load_texts
from specdec.eval.ratios import median_interval
from specdec.eval.ratios import speedup as ratio_of
from specdec.eval.summary import summarise
from specdec.stats import RequestStats
from tests.tiny_chat_model import save_tiny_chat_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def config(name: str, tiny: Path, *overrides: str) -> Any:
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose(name, [f"target.name={tiny}", "target.dtype=float64", "prompts.limit=2", *overrides])


def test_ratio_is_the_median_over_units_of_medians_over_repeats() -> None:
    # unit 0: ratios 2, 2, 8 -> 2; unit 1: 3, 5, 4 -> 4; unit 2: 1, 1, 1 -> 1; the median of 2, 4, 1 is 2
    times = {0: (2.0, 2.0, 8.0), 1: (3.0, 5.0, 4.0), 2: (1.0, 1.0, 1.0)}
    result = ratio_of([(unit, 0, t[repeat], 1.0) for repeat in range(3) for unit, t in times.items()])
    assert result is not None
    assert result.per_unit == {0: 2.0, 1: 4.0, 2: 1.0}
    assert result.median == 2.0
    assert (result.low, result.high) == (None, None)  # three units say too little
    assert ratio_of([]) is None


def test_batches_that_ran_together_are_paired_by_round_and_counted_per_token() -> None:
    ran = [[(1.0, 1), (3.0, 2), (5.0, 2)], [(2.0, 1), (4.0, 3)]]
    stats = [RequestStats(emissions=e, arrival_s=0.5, prefill_s=0.25) for e in ran]
    for own in stats:
        own.num_emitted_tokens = sum(count for _, count in own.emissions[1:])
    assert BatchRun.of(7, stats) == BatchRun(7, 7, 5.0 - 0.5 - 2 * 0.25)
    assert over([BatchRun(0, 20, 2.0)], [BatchRun(0, 10, 0.5)])["median"] == pytest.approx(2.0)
    with pytest.raises(AssertionError, match="paired"):
        over([BatchRun(0, 1, 1.0)], [BatchRun(1, 1, 1.0)])


def test_interval_of_equal_values_is_a_point() -> None:
    assert median_interval([1.5] * 6) == (1.5, 1.5)


def test_prompts_are_spread_over_the_file_and_long_ones_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"question_id": i, "turns": [f"question {i}", "and then?"]} for i in range(10)]
    rows.append({"question_id": 10, "turns": ["word " * 50]})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    wanted = OmegaConf.create({"texts": None, "path": str(path), "limit": 5, "max_words": 10})
    texts, left_out = load_texts(wanted)
    assert texts == [f"question {i}" for i in (0, 2, 4, 6, 8)]
    assert left_out == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a file"),
        ('{"other": "x"}', "nothing under 'turns', .*its columns are 'other'"),
        ('{"prompt": "a b c"}', "at most 2"),
    ],
)
def test_prompt_files_that_do_not_fit(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "p.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_texts(OmegaConf.create({"texts": None, "path": str(path), "limit": None, "max_words": 2}))


def test_speedup_end_to_end(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("drafter=oracle", "max_new_tokens=12", "repeats=2", "prompts=builtin", "prompts.limit=2")
    records = measure_point(config("speedup", tiny, *overrides), tmp_path)
    summary = summarise(records)
    assert set(summary["variants"]) == {"none", "control", "oracle", "transformers"}
    assert all(same["equal"] == same["of"] == 4 for same in summary["identity"].values())
    oracle = summary["variants"]["oracle"]
    # 11 tokens after prefill's: 5 + 5 + 1, and the last one is never drafted for
    assert oracle["acceptance_length"] == pytest.approx(11 / 3)
    assert oracle["acceptance_rate"] == 1.0
    assert [(s["variant"], s["over"]) for s in summary["speedups"]] == [
        ("control", "none"),
        ("oracle", "none"),
        ("transformers", "none"),
    ]
    assert [(s["variant"], s["over"]) for s in summary["over_peers"]] == [
        ("none", "transformers"),
        ("oracle", "transformers"),
    ]
    show_point(records, summary, Console())
    show_step_times(records, Console())
    shown = capsys.readouterr().out
    assert "oracle over transformers: decode" in shown
    assert "t(M)" in shown
    assert "conversations: 2, their prompts: 2, batch size: 1, repeats: 2" in " ".join(shown.split())


def test_a_finished_run_is_said_to_be_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path / "run")))
    monkeypatch.setattr(point_run, "HydraConfig", SimpleNamespace(get=lambda: own))
    overrides = ("drafter=ngram", "max_new_tokens=4", "repeats=1", "prompts=builtin", "prompts.limit=1", "peers=[]")
    measured = config("speedup", tiny, *overrides, "step_times=false")
    for said in ("written to", "measured before, nothing was run"):
        point_run.run_point(measured, Console(width=300))
        assert said in capsys.readouterr().out


def test_lossless_end_to_end(tiny: Path) -> None:
    result = lossless.measure(
        config(
            "lossless",
            tiny,
            "drafters=[none,ngram,oracle,random]",
            "batch_sizes=[1,2]",
            "max_new_tokens=10",
            "sampling.samples=40",
        )
    )
    assert [c["identical"] for c in result["checks"]] == [2] * 8
    assert lossless.show(result)
    json.dumps(result)


def test_kv_error_end_to_end(tiny: Path) -> None:
    """Fewer bits are worse, and the exit code says whether the bound holds."""
    found = {}
    for dtype in ("int8", "int4"):
        overrides = (f"kv_dtype={dtype}", "max_new_tokens=8", "most_kl=1e-3")
        result = found[dtype] = kv_error.measure(config("kv_error", tiny, *overrides))
        assert result["num_tokens"] > 16
        assert 0 < result["mean_kl"] <= result["max_kl"]
        assert 0 < result["top1_agreement"] <= 1
        json.dumps(result)
    assert 10 * found["int8"]["mean_kl"] < found["int4"]["mean_kl"]
    assert kv_error.show({**found["int8"], "mean_kl": 9e-4})
    assert not kv_error.show({**found["int8"], "mean_kl": 2e-3})
    assert found["int4"]["share_of_bytes"] < found["int8"]["share_of_bytes"] < 0.3
    with pytest.raises(ConfigError, match="kv_dtype='fp3'"):
        kv_error.measure(config("kv_error", tiny, "kv_dtype=fp3"))
    with pytest.raises(ConfigError, match="compared with itself"):
        kv_error.measure(config("kv_error", tiny, "kv_dtype=null"))
    with pytest.raises(ConfigError, match="both sides"):
        kv_error.measure(config("kv_error", tiny, "+engine.kv_dtype=int8"))


def test_a_wrong_token_is_no_near_tie(tiny: Path) -> None:
    llm = LLM(str(tiny), dtype="float64")
    prompt = [5, 6, 7]
    true = llm.generate(prompt, max_new_tokens=4, ignore_eos=True)[0].token_ids
    wrong = [*true[:2], (true[2] + 1) % 200 + 2, true[3]]
    found = lossless.first_divergence(llm, 0, prompt, true, wrong, near_tie=1e-8)
    assert found is not None
    assert (found.position, found.is_near_tie) == (2, False)
    assert found.gap == pytest.approx(found.engine_gap, rel=1e-5)
    assert lossless.first_divergence(llm, 0, prompt, true, true, near_tie=1e-8) is None


def test_rollback_benchmark_runs(tiny: Path) -> None:
    rows = rollback.measure(LLM(str(tiny)), contexts=(16, 600))
    assert [row["context"] for row in rows] == [16, 600]
    assert all(row["commit_us"] > 0 for row in rows)
