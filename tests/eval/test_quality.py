"""What quality says of a rule: on answers, numbers and likelihoods that are known by hand, and end to end."""

from __future__ import annotations

import json
import math
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import LlamaForCausalLM

from specdec import LLM, ConfigError
from specdec.api import random_model
from specdec.drafters.testing import RandomDrafter
from specdec.eval import perplexity, quality
from specdec.eval.final_answer import FinalAnswers, final_number, grade, mcnemar, reference_number
from specdec.eval.perplexity import Score, score
from specdec.eval.quality_config import QualityConfig
from specdec.eval.setting_checks import check_settings
from specdec.interfaces import Noise
from tests.tiny_chat_model import save_tiny_chat_model

EOS = 0
ROWS = [
    {"question_id": 1, "category": "math", "turns": ["first A", "and then?"], "reference": ["3 * 4 = 12\n#### 12"]},
    {"question_id": 2, "category": "math", "turns": ["then B"], "reference": ["#### 8"]},
    {"question_id": 3, "category": "math", "turns": ["A" * 40], "reference": ["#### 12"]},
]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 12", "12"),
        ("12", "12"),
        ("He has 3 + 4 = 7 apples.", "7"),
        ("It costs $1,234.50.", "1234.5"),
        ("$ 18", "18"),
        ("€1,000,000", "1000000"),
        ("£.99", "0.99"),
        ("12.00", "12"),
        ("It is 12km", "12"),
        ("12 USD each", "12"),
        ("50%", "50"),
        ("**7**", "7"),
        ("_8_", "8"),
        (r"\boxed{42}", "42"),
        (r"1{,}000", "1000"),
        ("<<6*2=12>>12", "12"),
        ("1/2", "1/2"),
        ("2e6", "2000000"),
        ("-3", "-3"),
        ("x = \u22125", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("(-4)", "-4"),
        ("10-5", "5"),
        ("10 - 5", "5"),
        ("pages 5\u201310", "10"),
        ("3 moles of CO2", "3"),
        ("1, 2,3", "3"),
        ("1,2345", "2345"),
        ("version 1.2.3", "1.2"),
        ("#### 12 (not 13)", "12"),
        ("first 5\n#### -1,200", "-1200"),
        ("so it is 5\n#### none", "5"),
        ("#### 3\nno, wait\n#### 4", "4"),
        ("#### 12 + 3 = 15", "15"),
        ("It is 12 m^2, or 12 m^{2}", "12"),
        ("9" * 5000, None),
        ("5 and " + "9" * 5000, "5"),
        ("twelve", None),
        ("", None),
    ],
)
def test_final_numbers(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


ANSWERS = ["18", "1,234", "1,234.50", "$5", "$ 5", "-3", "-$5", "$-5", "\u22125", ".5", "1/2", "2e6", "0", "007"]
SPELLINGS = [
    *("####{}", "#### {}", "####\t{} ", "so it is {}.\n#### {}", "#### **{}**", "#### __{}__", "#### ({})", "#### {}."),
    *("#### **{}.**", "#### = {}", r"#### \boxed{{{}}}", "#### {} dollars", "#### {} km/h", "#### {} %", "#### {} m^2"),
    *("#### {}-inch", "#### {} (3 of 15)", "#### **{} eggs** (not 7).", "Total: {} #### {}", "####\u00a0{}\r"),
]
AROUND = [
    "{}",
    "#### Step 1: count\n9 + 9 = 99\n\n{}",
    "#### 1. Count\n9 * 9 = 99\n#### 2) Add\n9 + 9\n{}\n",
    "{}\n\nQuestion: Tom has 4 boxes of 6 apples.\nAnswer: 4 * 6",
    "#### 7\nno, wait\n{}\n#### Explanation\n2 + 3 = 6",
    "{}\n##### 7 of 9\n### 8",
]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_marked_number_is_the_answer_however_it_is_spelled(spelling: str, around: str) -> None:
    for answer in ANSWERS:
        text = around.format(spelling.format(*[answer] * spelling.count("{}")))
        assert final_number(text) == final_number(answer), text


@pytest.mark.parametrize(
    "heading",
    [
        *("Step 3: total", "3 + 4 = 7", "12 * x = 60", "1. Count", "**1.** Count", "1) Count", "**1)** Count"),
        *("2: Count", "**2:** Count", "2:", "2 - Count", "2 \u2013 Count", "1st day", "**2nd** day", "3 boxes of 4"),
        *("none", "", "10-5", "Day 2", "Part 2 (of 3)", "4 = 2 + 2 (checked)", "9" * 500),
    ],
)
def test_a_markdown_heading_is_no_answer(heading: str) -> None:
    """A model that writes Markdown has its answer at the end."""
    assert final_number(f"#### {heading}\n5 * 3 = 15. She makes $15.") == 15
    assert final_number(f"She has 3.\n\n#### {heading}\n5 * 3 = 15\n\n#### Answer: **15**") == 15
    assert final_number(f"#### 7\n#### {heading}\n\n15") == (7 if not re.match(r"\W*\d", heading) else 15)


def test_long_answers_are_read_fast() -> None:
    """Models that loop: no pattern goes back over what it has read again and again."""
    for piece in ("#### ", "####", "#### (", "#### 1 (", "()", "#### 1. ", "-", "1,", "1.", r"\boxed"):
        started = time.perf_counter()
        final_number(f"#### 1 {piece * 5000}x\n#### {piece * 5000}x")
        assert time.perf_counter() - started < 2, piece


def test_only_marked_references_have_a_number() -> None:
    assert reference_number("36/3 = 12\n#### 1,200") == 1200
    assert reference_number("the answer is 12") is None
    assert reference_number("#### twelve") is None
    assert reference_number(None) is None


def test_grades_are_of_the_questions_that_have_a_number() -> None:
    assert grade(["12", "no idea", "13.0", "9"], [Fraction(12), Fraction(1), Fraction(13), None]) == [True, False, True]


def test_paired_accuracies_by_hand() -> None:
    # Both right 2, only the first 1, only the second 3, neither 2.
    first = [True] * 3 + [False] * 5
    second = [True] * 2 + [False] + [True] * 3 + [False] * 2
    found = FinalAnswers(first, second).summary()
    assert (found["accuracy"], found["accuracy_lossless"], found["difference"]) == (3 / 8, 5 / 8, -2 / 8)
    assert (found["num_only_here"], found["num_only_lossless"]) == (1, 3)
    assert found["p_value"] == 2 * (1 + 4) / 16
    assert found["difference_interval"] is None  # of eight questions
    low, high = FinalAnswers(first * 2, second * 2).summary()["difference_interval"]
    assert -1 <= low < -2 / 8 < high <= 1
    assert list(FinalAnswers(first * 2, first * 2).summary()["difference_interval"]) == [0.0, 0.0]
    assert FinalAnswers([True], [False]).summary()["difference_interval"] is None


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(1, 5) == mcnemar(5, 1) == 2 * (1 + 6) / 64
    assert mcnemar(0, 10) == 2 / 1024


@pytest.mark.parametrize("most", [2**27, 3000, 1])
def test_scores_are_those_of_each_answer_alone(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "_LOGITS", most)
    model = random_model("tiny", dtype=torch.float64)
    prompts, answers = [[5], [1, 2, 3, 4], [7, 8], [9]], [[6, 7, 8, 9, 10], [5], [1, 2, 3], []]
    found = score(model, prompts, answers)
    assert [s.num_tokens for s in found] == [5, 1, 3, 0]
    for prompt, answer, own in zip(prompts, answers, found, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        alone = -sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))
        assert own.nll == pytest.approx(alone, rel=1e-9)


def test_perplexity_is_per_token_over_all_answers() -> None:
    found = perplexity.perplexity([Score(2.0, 1), Score(1.0, 5), Score(0.0, 0)] * 8)
    assert found["perplexity"] == pytest.approx(math.exp(3 / 6))
    low, high = found["perplexity_interval"]
    assert math.exp(1 / 5) <= low < math.exp(3 / 6) < high <= math.exp(2)
    assert perplexity.perplexity([Score(2.0, 1)])["perplexity_interval"] is None
    assert perplexity.perplexity([Score(0.0, 0)]) == {"perplexity": None, "perplexity_interval": None}


def test_distinct_share_by_hand() -> None:
    # 1 2 3, 2 3 1, 3 1 2, 1 2 3 again; one more; none: too short
    assert quality.distinct_share([[1, 2, 3, 1, 2, 3], [1, 2, 3], [1, 2]]) == 4 / 5
    assert quality.distinct_share([[1, 2], []]) is None


def save_counting_model(folder: Path) -> Path:
    """Write a model whose next token depends on the last one only: after A comes 12, after B 79, then EOS."""
    save_tiny_chat_model(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    a, b, *digits = LLM(str(folder)).tokenizer("AB1279").input_ids
    after = list(range(model.config.vocab_size))
    for here, there in zip([a, *digits[:2], b, *digits[2:]], [*digits[:2], EOS, *digits[2:], EOS], strict=True):
        after[here] = there
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1)
        model.lm_head.weight.zero_().index_add_(0, torch.tensor(after), 8 * rows)  # several may come before one
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_counting_model(tmp_path_factory.mktemp("counting"))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def measure(folder: Path, *overrides: str) -> dict[str, Any]:
    own = [f"target.name={folder}", "target.dtype=float64", "max_new_tokens=12", "prompts.limit=4", *overrides]
    with initialize_config_module("specdec.configs", version_base="1.3"):
        result = quality.measure(compose("quality", own))
    json.dumps(result)
    quality.show(result)
    return result


def test_final_answers_end_to_end(counting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["prompts=jsonl", f"prompts.path={counting}/prompts.jsonl", "prompts.chat=false"]
    result = measure(
        counting, *rows, "temperature=0", "drafter=ngram", "verifier=match", "prompts.max_prompt_tokens=20"
    )
    texts = [[row["answers"][name]["text"] for name in ("lossless", "subject")] for row in result["answers"]]
    assert texts == [["12", "12"], ["79", "79"]]
    assert [row["number"] for row in result["answers"]] == ["12", "8"]
    assert [row["answers"]["subject"]["number"] for row in result["answers"]] == ["12", "79"]
    found = result["final_answers"]["subject"]
    assert (found["num_questions"], found["accuracy"], found["accuracy_lossless"]) == (2, 1 / 2, 1 / 2)
    view = result["texts"]["subject"]
    assert (view["num_tokens"], view["num_unfinished"], view["num_loops"], view["distinct_3"]) == (6, 0, 0, 1.0)
    assert [(row["name"], row["num_tokens"]) for row in result["left_out"]] == [("3", 40)]
    assert "0.500" in capsys.readouterr().out


def test_a_lossless_rule_agrees_entirely_and_is_said_to_be_a_control(tiny: Path) -> None:
    result = measure(tiny, "temperature=0", "drafter=random", "verifier=match", "batch_size=3")
    assert result["agreement"]["subject"]["exact_match_rate"] == 1.0
    assert result["agreement"]["subject"]["leading_share"] == 1.0
    assert result["agreement"]["subject"]["first_divergence_median"] is None
    assert result["texts"]["subject"] == result["texts"]["lossless"]
    assert result["lossless"] and "this run is a control" in result["note"]
    assert set(result["texts"]) == {"lossless", "subject"}
    assert result["final_answers"] == {"subject": None}
    assert result["texts"]["subject"]["num_unfinished"] == 4


def test_a_lossy_rule_parts_and_its_text_is_less_likely(tiny: Path) -> None:
    result = measure(tiny, "temperature=0", "drafter=random", "verifier=synthetic", "verifier.options.rate=0.8")
    found, texts = result["agreement"]["subject"], result["texts"]
    assert found["exact_match_rate"] == 0.0
    assert found["num_diverged"] == 4
    assert 0 <= found["leading_share"] < 0.9
    assert texts["subject"]["perplexity"] > texts["lossless"]["perplexity"]
    assert not result["lossless"] and result["note"] is None
    assert result["acceptance_rate"] > 0.3


def test_above_temperature_0_another_seed_is_the_control(tiny: Path) -> None:
    result = measure(tiny, "temperature=1.0", "seed=3", "drafter=random", "verifier=match")
    # With the same seed match gives the undrafted run's own tokens, with another one it does not.
    assert result["agreement"]["subject"]["exact_match_rate"] == 1.0
    assert result["agreement"]["control"]["exact_match_rate"] == 0.0
    assert set(measure(tiny, "temperature=1.0", "control=false", "verifier=match")["texts"]) == {"lossless", "subject"}
    drawn = measure(tiny, "temperature=1.0", "drafter=random", "verifier=rejection")
    assert drawn["lossless"] and "no better than that of another seed" in drawn["note"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch_size=0"], "batch_size=0; allowed: an integer >= 1"),
        (["max_new_tokens=0"], "max_new_tokens=0; allowed"),
        (["seed=null"], "temperature=0.7 without a seed"),
        (["temperature=nan"], "temperature=nan"),
        (["seed=-1"], "seed=-1; allowed: an integer >= 0"),
        (["max_new_tokens=5000"], "none of the 8 prompts can be run.* the target takes 4096"),
        (["verifier.options={threshold: 1}"], "threshold"),
    ],
)
def test_bad_input_is_refused(tiny: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(tiny, *overrides)


@pytest.mark.parametrize(("name", "value"), [("seed", "foo"), ("control", "x"), ("batch_size", 1.5), ("seed", True)])
def test_values_of_a_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        check_settings(QualityConfig, OmegaConf.create({name: value}))


class RaisingDrafter(RandomDrafter):
    """Raises whenever it is asked."""

    name = "raising"

    def propose(self, requests: Any, noise: Noise) -> Any:
        raise RuntimeError("no")


def test_a_drafter_that_raises_is_told(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(tiny, f"drafter.name={__name__}:RaisingDrafter", "+drafter.options={}", "verifier=match")
    assert (result["num_drafter_errors"], result["num_draft_tokens"]) == (4, 0)
    said = " ".join(capsys.readouterr().out.split())
    assert "raising raised in 4 answers" in said and "drafted nothing" in said


@pytest.mark.slow
def test_typical_on_the_real_model(smollm2: tuple[Any, Any]) -> None:
    data = Path(__file__).resolve().parents[3] / "shared/data/gsm8k_dev.jsonl"
    if not data.is_file():
        pytest.skip("the questions are absent")
    with initialize_config_module("specdec.configs", version_base="1.3"):
        own = ["prompts=gsm8k", f"prompts.path={data}", "prompts.limit=3", "max_new_tokens=12", "drafter=ngram"]
        result = quality.measure(compose("quality", own))
    assert result["verifier"] == "typical" and not result["lossless"]
    assert result["final_answers"]["subject"]["num_questions"] == 3
    assert 1 < result["texts"]["lossless"]["perplexity"] < 20
