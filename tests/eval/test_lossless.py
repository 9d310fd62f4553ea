"""The losslessness report: exact laws are exact, right rules pass as often as they should, wrong ones fail."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from specdec import LLM, ConfigError, IncompatibleDrafterError
from specdec.api import random_model
from specdec.drafters.testing import RandomDrafter
from specdec.eval import lossless, lossless_report
from specdec.eval.goodness_of_fit import (
    TILTS,
    counts_evidence,
    evidence_p_value,
    groups_evidence,
    log_moments,
    tilts_evidence,
    uniform_p_value,
)
from specdec.eval.lossless_config import LosslessConfig
from specdec.eval.lossless_report import page, verdict
from specdec.eval.sampling_tests import Drawn, compare, draw
from specdec.eval.setting_checks import check_settings
from specdec.eval.target_law import target_law
from specdec.interfaces import Noise
from tests.tiny_chat_model import save_tiny_chat_model

PROMPT = [5, 6, 7, 8, 9, 10]
SMALL = ("max_new_tokens=6", "batch_sizes=[2]", "sampling.samples=60", "sampling.num_prompts=1")


class LyingDrafter(RandomDrafter):
    """Drafts a token of its own choice and says that it was drawn from the uniform distribution."""

    name = "liar"

    def _children(self, row: int, depth: int, parent: int, width: int, noise: Noise) -> list[int]:
        return [super()._children(row, depth, parent, width, noise)[0] % 16]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("tiny")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def config(tiny: Path, *overrides: str) -> Any:
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose("lossless", [f"target.name={tiny}", "prompts.limit=2", *SMALL, *overrides])


def test_p_values_of_known_statistics() -> None:
    assert evidence_p_value(torch.tensor([math.log(40.0), -math.inf])) == pytest.approx(1 / 20)
    assert evidence_p_value(torch.tensor([-3.0, -math.inf])) == 1.0
    assert evidence_p_value(torch.tensor([math.inf, -math.inf])) == 0.0
    n = 10_000
    even = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert uniform_p_value(even) == 1.0
    assert uniform_p_value(even**1.2) < 1e-3
    shift = 1.3581 / math.sqrt(n) - 0.5 / n  # the 5 % point of the limiting law
    assert uniform_p_value((even + shift).clamp_max(1.0)) == pytest.approx(0.05, rel=1e-3)


def test_nobody_expects_to_win_a_bet() -> None:
    """Over all that can be drawn the means of what bets have at the end are what they begin with: 1 in total."""
    law = torch.tensor([0.7, 0.25, 0.05], dtype=torch.float64)
    laws = torch.stack([law, law.flip(0), torch.tensor([0.0, 1e-9, 1 - 1e-9], dtype=torch.float64)])
    counts, groups, tilts = [], [], []
    for draws in product(range(3), repeat=3):
        drawn = torch.tensor(draws)
        probs = laws[range(3), drawn]
        tilts.append(tilts_evidence(probs.log(), log_moments(laws.log())) + probs.prod().log())
        groups.append(groups_evidence(drawn, laws) + probs.prod().log())
        often = torch.bincount(drawn, minlength=3).double()
        counts.append(counts_evidence(often, law) + law[drawn].prod().log())
    for evidence in (counts, groups, tilts):
        means = torch.stack([row.nan_to_num(nan=-math.inf) for row in evidence]).logsumexp(dim=0).exp()
        assert bool((means < 1 + 1e-9).all())
    assert torch.stack(counts).logsumexp(dim=0).exp().tolist() == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("tail", [1e-2, 1e-3, 1e-4, 1e-5])
def test_rare_events_are_no_evidence(tail: float) -> None:
    """Of draws that are nearly certain: a rare one comes now and then, and counts for no more than it should.

    Normal and chi-square approximations, with rare cells pooled or not, fail here in up to one of ten samples.
    """
    num_draws, num_groups, level = 600, 8, 2.5e-4
    laws = torch.full((2, num_groups), tail / (num_groups - 1), dtype=torch.float64)
    laws[0, 0] = laws[1, 1] = 1 - tail
    moments, source = log_moments(laws.log()), torch.Generator().manual_seed(0)
    failed = torch.zeros(4)
    for _ in range(2000):
        which = torch.randint(0, 2, (num_draws,), generator=source)
        drawn = torch.multinomial(laws[which], 1, generator=source)[:, 0]
        own = laws[which, drawn]
        before = torch.where(own > 0.5, 0.0, 1 - tail + (own * (drawn - 1).clamp_min(0)))
        noise = torch.rand(num_draws, generator=source, dtype=torch.float64)
        often = torch.bincount(drawn[which == 0], minlength=num_groups).double()
        p_values = [
            evidence_p_value(counts_evidence(often, laws[0])),
            evidence_p_value(groups_evidence(drawn, laws[which])),
            evidence_p_value(tilts_evidence(own.log(), moments[which])),
            uniform_p_value((before + noise * own).clamp_max(1.0)),
        ]
        failed += torch.tensor(p_values) < level
    assert bool((failed <= 3).all()), failed  # more than 3 of 2000 at this level: chance 2e-3 for each test


def test_what_cannot_be_and_what_comes_too_often_is_found() -> None:
    law = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    assert evidence_p_value(counts_evidence(torch.tensor([1.0, 9.0, 10.0]), law)) == 0.0
    drawn = torch.tensor([1, 1, 2] * 100)  # 200 and 100 of a fair coin
    often = torch.bincount(drawn, minlength=3).double()
    assert evidence_p_value(counts_evidence(often, law)) < 1e-5
    assert evidence_p_value(groups_evidence(drawn, law.repeat(300, 1))) < 1e-6
    bent = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    drawn = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 0] * 30)  # sharper
    log_probs = bent.log()
    moments = log_moments(log_probs[None]).repeat(300, 1)
    assert evidence_p_value(tilts_evidence(log_probs[drawn], moments)) < 1e-6


def test_the_law_is_that_of_the_models_own_logits(model: Any) -> None:
    temperature, drawn = 0.5, [(3, 4, 5), (3, 4, 6), (200, 1, 0)]
    law = target_law(model, PROMPT, drawn, 400, temperature)
    for path, depth in product(drawn, range(3)):
        ids = torch.tensor([[*PROMPT, *path[:depth]]])
        logs = (model(ids).logits[0, -1].double() / temperature).log_softmax(dim=-1)
        after, probs, token = law.after[path[:depth]], logs.exp(), path[depth]
        p, likelier = after.drawn[token]
        assert p == pytest.approx(float(probs[token]), rel=1e-4)
        assert likelier == pytest.approx(float(probs[probs > probs[token]].sum()), abs=1e-4)
        assert after.mean == pytest.approx(float((probs * logs).sum()), rel=1e-4)
        assert after.moments.tolist() == pytest.approx([float((probs ** (1 + t)).sum().log()) for t in TILTS], rel=1e-3)
    cells = law.cells()
    assert sum(cells.values()) == pytest.approx(1.0)
    assert {law.cell_of(path) for path in drawn} <= set(cells)
    assert all(mass * 400 >= 5 for path, mass in law.mass.items() if path)
    assert any(len(path) == 2 for path in law.mass)  # paths, not only first tokens


def test_equally_likely_tokens_divide_the_unit_interval() -> None:
    flat = random_model("tiny")
    flat.lm_head.weight.data.zero_()
    law = target_law(flat, PROMPT, [(t, 0) for t in range(256)], 10, 1.0)
    assert [law.after[()].drawn[t][1] for t in (0, 1, 255)] == pytest.approx([0, 1 / 256, 255 / 256])


def test_a_prompt_of_one_token_has_a_law(model: Any) -> None:
    law = target_law(model, [7], [(1, 2)], 10, 1.0)
    assert 0 < law.after[()].drawn[1][0] < 1


@pytest.mark.parametrize(
    ("drafter", "rule"), [("random", "rejection"), ("random", "traversal"), ("self_int8", "match")]
)
def test_right_rules_fail_as_rarely_as_they_should(model: Any, drafter: str, rule: str) -> None:
    """Over 30 seeds the p-values are no smaller than uniform ones."""
    llm = LLM(model, drafter=drafter, verifier=rule)
    runs = [draw(llm, [PROMPT], 100, 4, 0.7, seed) for seed in range(30)]
    assert sum(run.num_accepted_tokens for run in runs) > 100
    assert sum(run.num_refused_tokens for run in runs) > 30
    law = target_law(model, PROMPT, [path for run in runs for path in run.paths[0]], 100, 0.7)
    tests = [compare(run.paths, [law], seed) for seed, run in enumerate(runs)]
    for name in ("paths_p_value", "tokens_p_value", "ranks_p_value", "likelihood_p_value"):
        ordered = sorted(getattr(test, name) for test in tests)
        too_small = max((i + 1) / 30 - p for i, p in enumerate(ordered))
        assert math.exp(-2 * 30 * max(too_small, 0) ** 2) > 1e-3, name  # one-sided Kolmogorov-Smirnov


@pytest.mark.parametrize(
    ("drafter", "rule", "options"),
    [
        ("early_exit", "typical", {}),
        ("early_exit", "relaxed", {"relaxed_topk": 10, "relaxed_delta": 0.6}),
        (f"{__name__}:LyingDrafter", "rejection", {}),
        (f"{__name__}:LyingDrafter", "traversal", {}),
    ],
)
def test_wrong_rules_and_lying_drafters_fail(model: Any, drafter: str, rule: str, options: dict[str, Any]) -> None:
    """At the default number of samples, and by far."""
    llm = LLM(model, drafter=drafter, verifier=rule, verifier_options=options)
    drawn = draw(llm, [PROMPT], 1000, 4, 0.4, seed=0)
    test = compare(drawn.paths, [target_law(model, PROMPT, drawn.paths[0], 1000, 0.4)])
    assert min(test.p_values) < 1e-7


def test_a_token_that_cannot_be_fails(model: Any) -> None:
    """Processors of the generation config are part of the law."""
    forbidding = random_model("tiny")
    forbidding.generation_config.suppress_tokens = [3]
    law = target_law(forbidding, PROMPT, [(1, 3, 1)] * 20, 20, 1.0)
    assert law.after[1,].drawn[3][0] == 0
    test = compare([[(1, 3, 1)] * 20], [law])
    assert test.likelihood_p_value == 0


def test_the_generator_of_the_caller_is_left_alone(model: Any) -> None:
    llm = LLM(model)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (draw(llm, [PROMPT], 20, 3, 1.0, seed).paths for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert first == again != other


def test_both_spellings_and_dtypes(tiny: Path) -> None:
    """`drafter=` and `drafters=` say the same; every dtype has its rows, and the first one is sampled."""
    one = lossless.measure(config(tiny, "drafter=random", "dtypes=[float32,bfloat16]"))
    many = lossless.measure(config(tiny, "drafters=[random]", "dtypes=[float32,bfloat16]"))
    for result in (one, many):
        assert [(c["drafter"], c["dtype"]) for c in result["checks"]] == [("random", "float32"), ("random", "bfloat16")]
        assert result["sampling"]["dtype"] == "float32"
        assert [t["verifier"] for t in result["sampling"]["tests"]] == ["rejection", "match", "traversal"]
        json.dumps(result)
    assert one["sampling"] == many["sampling"]
    found = verdict(one)
    assert found.word == "lossless" and "greedy float32: 2/2 identical; greedy bfloat16: " in found.grounds
    assert "sampling: 12 tests, smallest p 0." in str(found)
    assert str(found) in page(one)
    assert "| random | rejection |" in page(one)
    options = config(tiny, "drafter=oracle", "+drafter.options.accept_rate=1.0", "sampling.samples=0")
    assert lossless.measure(options)["checks"][0]["num_draft_tokens"] > 0


def test_default_drafters_that_do_not_fit_are_left_out(tiny: Path) -> None:
    overrides = ("default_drafters=[none,ngram,eagle3]", "sampling.samples=0")
    result = lossless.measure(config(tiny, *overrides))
    assert [c["drafter"] for c in result["checks"]] == ["none", "ngram"]
    assert [left["drafter"] for left in result["left_out"]] == ["eagle3"]
    assert verdict(result).grounds.startswith("greedy float32: 4/4 identical; sampling: not tested")
    everything = lossless.measure(config(tiny, "default_drafters=[eagle3]", "sampling.samples=0"))
    assert (verdict(everything).word, everything["checks"]) == ("not shown", [])
    with pytest.raises(IncompatibleDrafterError):
        lossless.measure(config(tiny, "drafter=eagle3"))


def test_a_drafter_that_one_dtype_refuses_is_named_with_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the dtypes it is: the others have its rows."""
    made = lossless._drafting

    def picky(base: LLM, name: str, *given: Any, **more: Any) -> LLM:
        if (name, base.model.dtype) == ("ngram", torch.float32):
            raise IncompatibleDrafterError("not in float32. Take another one")
        return made(base, name, *given, **more)

    monkeypatch.setattr(lossless, "_drafting", picky)
    overrides = ("default_drafters=[none,ngram]", "dtypes=[float32,bfloat16]", "sampling.samples=0")
    result = lossless.measure(config(tiny, *overrides))
    rows = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "ngram")]
    assert [(c["dtype"], c["drafter"]) for c in result["checks"]] == rows
    assert result["left_out"] == [{"drafter": "ngram", "dtype": "float32", "reason": "not in float32"}]
    assert "Left out in float32: ngram, not in float32" in page(result)


@pytest.mark.parametrize("drafter", ["random", "self_int8"])
def test_sampled_prompts_are_prefilled_once(drafter: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix caching is on, beside what the config sets of the engine, and the samples are those without it."""
    seen: list[tuple[LLM, list[int], Drawn]] = []

    def noting(llm: LLM, prompts: list[list[int]], *given: Any) -> Drawn:
        drawn = draw(llm, prompts, *given)
        seen.append((llm, prompts[0], drawn))
        return drawn

    monkeypatch.setattr(lossless, "draw", noting)
    overrides = (f"drafter={drafter}", "verifier=match", "engine.max_batch_size=7", "max_new_tokens=2")
    lossless.measure(config(tiny, *overrides))
    ((llm, prompt, drawn),) = seen
    assert llm.engine.config.prefix_caching and llm.engine.config.max_batch_size == 7
    block = llm.engine.target.cache.block_tokens
    assert len(prompt) > block
    assert llm.engine.stats.num_cached_tokens >= 60 * ((len(prompt) - 1) // block) * block
    uncached = LLM(llm.model, drafter=drafter, verifier="match")
    assert draw(uncached, [prompt], 60, 4, 1.0, seed=0) == drawn
    assert uncached.engine.stats.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter=ngram", "drafters=[random]"], "give one of them"),
        (["drafters=[]"], "at least one"),
        (["default_drafters=[]"], "at least one"),
        (["sampling.default_drafters=[]"], "at least one"),
        (["dtypes=[]"], "dtypes"),
        (["batch_sizes=[]"], "batch_sizes=.*at least one"),
        (["batch_sizes=[0]"], "batch_sizes=0; allowed: an integer >= 1"),
        (["batch_sizes=[2,2]"], "twice"),
        (["max_new_tokens=0"], "max_new_tokens=0; allowed"),
        (["near_tie=-1"], "near_tie=-1"),
        (["near_tie=nan"], "near_tie=nan"),
        (["near_ties_per_prompt=nan"], "near_ties_per_prompt=nan"),
        (["temperature=inf"], "temperature=inf"),
        (["sampling.seed=-1"], "sampling.seed=-1"),
        (["temperature=0"], "sampling.samples=0 leaves them out"),
        (["sampling.tokens=2"], "sampling.tokens=2; allowed: an integer >= 3"),
        (["sampling.samples=-1"], "sampling.samples=-1"),
        (["sampling.level=1"], "sampling.level=1"),
        (["drafters=[none]", "sampling.tokens=5000"], "no prompt leaves room for 5000"),
    ],
)
def test_settings_that_mean_nothing(tiny: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lossless.measure(config(tiny, *overrides))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_sizes", 5),
        ("batch_sizes", ["a"]),
        ("drafters", "ngram"),
        ("dtypes", "float32"),
        ("max_new_tokens", "many"),
        ("near_tie", "x"),
        ("sampling", {"samples": "x"}),
    ],
)
def test_values_of_a_wrong_type(name: str, value: Any) -> None:
    """Whoever calls `measure` without Hydra is told too."""
    with pytest.raises(ConfigError, match=name):
        check_settings(LosslessConfig, OmegaConf.create({name: value}))


def test_a_prompt_that_does_not_fit_is_left_out_and_named(tiny: Path, tmp_path: Path) -> None:
    rows = [{"question_id": "[/q1]", "prompt": "abc"}, {"question_id": "[/q2]", "prompt": "a" * 5000}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    prompts = ["prompts=jsonl", f"prompts.path={tmp_path}/prompts.jsonl", "prompts.chat=false"]
    long = [*prompts, "prompts.max_words=null", "prompts.max_prompt_tokens=null"]
    result = lossless.measure(config(tiny, *long, "drafter=random", "sampling.samples=0"))
    assert [check["num_prompts"] for check in result["checks"]] == [1]
    assert [(row["name"], row["num_tokens"]) for row in result["left_out_prompts"]] == [("[/q2]", 5000)]
    assert lossless.show(result)
    assert "[/q2]" in page(result) and "the target takes 4096" in page(result)


def test_lossy_by_its_own_word_without_a_sampling_test(tiny: Path) -> None:
    result = lossless.measure(config(tiny, "drafter=random", "verifier=typical", "sampling.samples=0"))
    found = verdict(result)
    assert found.word == "NOT lossless" and "typical is LOSSY by its own word" in found.grounds


class RaisingDrafter(RandomDrafter):
    """Raises whenever it is asked."""

    name = "raising"

    def propose(self, requests: Any, noise: Noise) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("overrides", "grounds"),
    [
        ([f"drafter.name={__name__}:RaisingDrafter"], "raised in 2 answers"),
        (["max_new_tokens=2"], "nothing was drafted by random"),
    ],
)
def test_nothing_is_shown_where_nothing_was_drafted(tiny: Path, overrides: list[str], grounds: str) -> None:
    result = lossless.measure(config(tiny, "drafter=random", "sampling.samples=0", *overrides))
    found = verdict(result)
    assert (found.word, found.code) == ("not shown", 1)
    assert grounds in found.grounds and "nothing was drafted by" in found.grounds
    assert grounds in page(result)


def test_tables_fit_in_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless_report.console, "_width", 80)
    result = _result(drafter="draft_model", verifier="rejection", num_accepted_tokens=1234, num_refused_tokens=2345)
    for name, p in zip(lossless_report.P_VALUES.values(), (6.3e-16, 0.0, 0.0025, 6.3e-160), strict=True):
        result["sampling"]["tests"][0][name] = p
    assert lossless.show(result)
    out = capsys.readouterr().out
    assert "draft_model" in out and "rejection" in out and "1234/2345" in out and "log p" in out and "6e-160" in out


def _result(**changes: Any) -> dict[str, Any]:
    check = {"dtype": "float32", "identical": 8, "num_prompts": 8, "lossless": True, "num_draft_tokens": 9}
    check |= {"drafter": "d", "batch_size": 1, "divergences": [], "unequal_lengths": []}
    check |= {"lossy_rules": [], "num_drafter_errors": 0}
    row = {"drafter": "d", "verifier": "v", "claims_lossless": True, "smallest_p_value": 0.2, "excess_log_prob": 0.0}
    row |= {"num_accepted_tokens": 5, "num_refused_tokens": 5, "num_draft_tokens": 9, "num_drafter_errors": 0}
    check |= {name: value for name, value in changes.items() if name in check}
    row |= {name: value for name, value in changes.items() if name in row}
    sampling = {"level": 1e-3, "tests": [row], "dtype": "float32", "temperature": 1.0}
    sampling |= {"num_samples": 9, "num_tokens": 4, "num_prompts": 1}
    return {"checks": [check], "sampling": sampling, "left_out": [], "left_out_prompts": []}


@pytest.mark.parametrize(
    ("sha", "dirty", "line"),
    [
        ("c0ffee", True, "at c0ffee with changes;"),
        ("c0ffee", False, "at c0ffee;"),
        (None, None, "at code that is not known;"),
    ],
)
def test_the_page_keeps_its_tables_and_says_which_code(sha: str | None, dirty: bool | None, line: str) -> None:
    """Outside a checkout too, and with names that hold what Markdown divides columns by."""
    result = _result(drafter="a|b") | {"config": {"target": {"name": "t"}}}
    result["provenance"] = {"git_sha": sha, "git_dirty": dirty, "time": "now"}
    for name in lossless_report.P_VALUES.values():
        result["sampling"]["tests"][0][name] = 0.5
    written = page(result)
    assert f"Made now {line}" in written
    rows = [row for row in written.splitlines() if row.startswith("|")]
    assert sum("a\\|b" in row for row in rows) == 2 and "\\\\" not in written
    assert [row.replace("\\|", "").count("|") for row in rows] == [7] * 3 + [10] * 3


@pytest.mark.parametrize(
    ("changes", "word", "grounds"),
    [
        ({}, "lossless", "8/8 identical; sampling: 4 tests, smallest p 0.2"),
        ({"smallest_p_value": 2e-4}, "NOT lossless", "smallest p 0.0002 of d with v, below 0.00025"),
        ({"smallest_p_value": 3e-4}, "lossless", "smallest p 0.0003"),
        ({"claims_lossless": False}, "NOT lossless", "v is LOSSY by its own word"),
        ({"lossy_rules": ["w"]}, "NOT lossless", "w is LOSSY by its own word"),
        ({"num_draft_tokens": 0}, "not shown", "nothing was drafted by d"),
        ({"num_draft_tokens": 0, "num_drafter_errors": 2}, "not shown", "d raised in 4 answers"),
        ({"num_drafter_errors": 1}, "lossless", "d raised in 2 answers"),
        ({"drafter": "none", "num_draft_tokens": 0}, "not shown", "nothing was drafted by none"),
        ({"num_accepted_tokens": 0}, "not shown", "no drafter had drafts both accepted and refused"),
        ({"num_refused_tokens": 0}, "not shown", "no drafter had drafts both accepted and refused"),
        ({"identical": 7, "divergences": [{"is_near_tie": True}]}, "lossless", "7/8 identical, 1 part at a near-tie"),
        (
            {"identical": 7, "divergences": [{"is_near_tie": True}], "lossless": False},
            "NOT lossless",
            "1 part at a near-tie, TOO MANY",
        ),
        (
            {"identical": 7, "divergences": [{"is_near_tie": False}], "lossless": False},
            "NOT lossless",
            "7/8 identical, 1 DIFFERENT",
        ),
        (
            {"unequal_lengths": [{"at_limit": False}], "lossless": False},
            "NOT lossless",
            "answers of other lengths",
        ),
    ],
)
def test_the_verdict(changes: dict[str, Any], word: str, grounds: str) -> None:
    found = verdict(_result(**changes))
    assert (found.word, found.code) == (word, int(word != "lossless"))
    assert grounds in found.grounds


@pytest.mark.parametrize(
    ("overrides", "code", "line"),
    [
        (["drafter=random", "sampling.samples=100"], 0, "verdict: lossless (greedy float32: 2/2"),
        (["drafter=random", "verifier=typical", "temperature=1", "sampling.samples=400"], 1, "verdict: NOT lossless"),
        (["drafters=[]"], 2, "drafters=[]"),
    ],
)
def test_the_command(tiny: Path, tmp_path: Path, overrides: list[str], code: int, line: str) -> None:
    """Ends with the verdict's line and code and leaves the JSON file and the page."""
    out = tmp_path / "it.json"
    command = [f"target.name={tiny}", "prompts.limit=2", *SMALL, f"output={out}", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "specdec.eval.lossless", *command, *overrides], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert line in done.stdout + done.stderr
    if code < 2:
        result = json.loads(out.read_text())
        assert result["provenance"]["versions"]["torch"] == torch.__version__
        assert result["verdict"]["word"] in line
        assert "verdict: " in out.with_suffix(".md").read_text()
