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

from specdec import LLM, ConfigError, IncompatibleDrafterError
from specdec.api import random_model
from specdec.drafters.testing import RandomDrafter
from specdec.eval import lossless
from specdec.eval.goodness_of_fit import (
    changing_chi_square,
    chi_square,
    chi_square_p_value,
    normal_p_value,
    uniform_p_value,
)
from specdec.eval.lossless_report import page, verdict
from specdec.eval.sampling_tests import compare, draw
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
    assert chi_square_p_value(3.841459, 1) == pytest.approx(0.05, rel=1e-5)
    assert chi_square_p_value(18.30704, 10) == pytest.approx(0.05, rel=1e-5)
    assert (chi_square_p_value(math.inf, 3), chi_square_p_value(0.0, 0)) == (0.0, 1.0)
    assert normal_p_value(1.959964) == pytest.approx(0.05, rel=1e-5)
    n = 10_000
    even = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert uniform_p_value(even) == 1.0
    assert uniform_p_value(even**1.2) < 1e-3
    shift = 1.3581 / (math.sqrt(n) + 0.12) - 0.5 / n  # the 5 % point of the limiting law
    assert uniform_p_value((even + shift).clamp_max(1.0)) == pytest.approx(0.05, rel=1e-2)


def test_rare_cells_are_pooled_by_what_is_expected() -> None:
    # 1 + 2 + 3 make one cell of 6 with 9 seen, beside 10 with 7: 9/6 + 9/10
    statistic, degrees = chi_square([7, 4, 3, 2], [10, 1, 2, 3])
    assert (statistic, degrees) == (pytest.approx(2.4), 1)
    assert chi_square([3, 13], [0.0, 16.0])[0] == math.inf  # what cannot be


def test_draws_of_one_law_give_pearsons_statistic() -> None:
    probs = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    observed = torch.tensor([30.0, 20.0, 50.0], dtype=torch.float64)
    pearson = chi_square(observed.tolist(), (100 * probs).tolist())
    assert changing_chi_square(observed, probs.repeat(100, 1)) == (pytest.approx(pearson[0]), pearson[1])
    # Certain draws leave only the others: 50 of a fair coin, 25 expected, 40 seen.
    shares = torch.tensor([[0.5, 0.5, 0.0]] * 50 + [[0.0, 0.0, 1.0]] * 50, dtype=torch.float64)
    seen = torch.tensor([40.0, 10.0, 50.0], dtype=torch.float64)
    assert changing_chi_square(seen, shares) == (pytest.approx(18.0), 1)


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
        assert after.variance == pytest.approx(float((probs * logs**2).sum() - after.mean**2), rel=1e-3)
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
    """Over 30 seeds the p-values are uniform."""
    llm = LLM(model, drafter=drafter, verifier=rule)
    runs = [draw(llm, [PROMPT], 100, 4, 0.7, seed) for seed in range(30)]
    assert sum(run.num_accepted_tokens for run in runs) > 100
    assert sum(run.num_refused_tokens for run in runs) > 30
    law = target_law(model, PROMPT, [path for run in runs for path in run.paths[0]], 100, 0.7)
    tests = [compare(run.paths, [law], seed) for seed, run in enumerate(runs)]
    for name in ("paths_p_value", "tokens_p_value", "ranks_p_value", "likelihood_p_value"):
        assert uniform_p_value(torch.tensor([getattr(test, name) for test in tests])) > 1e-3, name


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
    assert verdict(result).grounds == "greedy float32: 4/4 identical; sampling: not tested"
    with pytest.raises(IncompatibleDrafterError):
        lossless.measure(config(tiny, "drafter=eagle3"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter=ngram", "drafters=[random]"], "give one of them"),
        (["drafters=[]"], "at least one"),
        (["dtypes=[]"], "dtypes"),
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


def _result(**changes: Any) -> dict[str, Any]:
    check = {"dtype": "float32", "identical": 8, "num_prompts": 8, "lossless": True, "num_draft_tokens": 9}
    check |= {"drafter": "d", "batch_size": 1, "divergences": [], "unequal_lengths": []}
    row = {"drafter": "d", "verifier": "v", "claims_lossless": True, "smallest_p_value": 0.2}
    row |= {"num_accepted_tokens": 5, "num_refused_tokens": 5}
    check |= {name: value for name, value in changes.items() if name in check}
    row |= {name: value for name, value in changes.items() if name in row}
    return {"checks": [check], "sampling": {"level": 1e-3, "tests": [row]}}


@pytest.mark.parametrize(
    ("changes", "word", "grounds"),
    [
        ({}, "lossless", "8/8 identical; sampling: 4 tests, smallest p 0.2"),
        ({"smallest_p_value": 2e-4}, "NOT lossless", "smallest p 0.0002 of d with v, below 0.00025"),
        ({"smallest_p_value": 3e-4}, "lossless", "smallest p 0.0003"),
        ({"claims_lossless": False}, "NOT lossless", "v is LOSSY by its own word"),
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
