"""The metrics give what is computed by hand here, alone, as classes and combined, in any home and any process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import evaluate
import pytest

import specdec.eval.metrics as metrics
from specdec import ConfigError, InputError
from specdec.eval.metrics import METRICS, metric_path
from specdec.eval.metrics.columns import INPUTS, OPTIONS

# Four drafted: 2 taken, 0 taken; none drafted; a tree of 6 nodes, 3 deep: all taken, and the answer ends there.
FIRST = [[4, 4, 2, 3], [4, 4, 0, 1], [0, 0, 0, 1]]
SECOND = [[6, 3, 3, 3]]
INPUTS_OF: dict[str, dict[str, Any]] = {
    "acceptance_rate": {"steps": [FIRST, SECOND]},
    "acceptance_length": {"steps": [FIRST, SECOND]},
    "acceptance_per_position": {"steps": [FIRST, SECOND]},
    "exact_match_rate": {"predictions": [[1, 2, 3], [1, 2]], "references": [[1, 2, 3], [1, 2, 9]]},
    "first_divergence": {"predictions": [[1, 2, 3], [1, 2]], "references": [[1, 2, 3], [1, 2, 9]]},
    "speedup": {
        "prompts": [0, 0, 1, 0, 1, 1, 2],
        "baseline_s": [2.0, 2.0, 3.0, 8.0, 5.0, 4.0, 6.0],
        "baseline_tokens": [10, 10, 10, 10, 10, 10, 30],
        "variant_s": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0],
        "variant_tokens": [10, 10, 10, 10, 10, 10, 10],
    },
    "sample_distance": {"predicted_samples": [[[1], [1], [2], [2]]], "reference_samples": [[[1], [3]]]},
    "logprob_distance": {
        "predicted_logprobs": [[math.log(0.5), math.log(0.25), math.log(0.25)]],
        "reference_logprobs": [[math.log(0.5), math.log(0.5), -math.inf]],
    },
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "metrics"))


def metric(name: str) -> Any:
    return getattr(metrics, METRICS[name])()


def test_inputs_are_those_of_the_metrics() -> None:
    assert set(INPUTS_OF) == set(METRICS)
    assert {name for inputs in INPUTS_OF.values() for name in inputs} == INPUTS
    assert not INPUTS & OPTIONS


def test_acceptance_rate_is_micro_and_never_above_one() -> None:
    found = metric("acceptance_rate").compute(steps=[FIRST, SECOND])
    assert found["acceptance_rate"] == pytest.approx(5 / 14)
    assert found["acceptance_rate_macro"] == pytest.approx((2 / 8 + 3 / 6) / 2)
    assert (found["acceptance_rate_low"], found["acceptance_rate_high"]) == (None, None)  # of two requests
    more = metric("acceptance_rate").compute(steps=[FIRST, SECOND] * 4)
    assert 2 / 8 <= more["acceptance_rate_low"] < 5 / 14 < more["acceptance_rate_high"] <= 3 / 6
    # All accepted and a token more: 5 of 4 drafted are emitted, and the rate is still 1.
    assert metric("acceptance_rate").compute(steps=[[[4, 4, 4, 5]]])["acceptance_rate"] == 1.0


def test_acceptance_length_counts_steps_without_drafts() -> None:
    found = metric("acceptance_length").compute(steps=[FIRST, SECOND])
    assert found["acceptance_length"] == pytest.approx(8 / 4)
    assert found["acceptance_length_macro"] == pytest.approx((5 / 3 + 3) / 2)
    only = metric("acceptance_length").compute(steps=[[[0, 0, 0, 1]] * 3])
    assert only == dict.fromkeys(("acceptance_length_low", "acceptance_length_high")) | {
        "acceptance_length": 1.0,
        "acceptance_length_macro": 1.0,
    }


def test_acceptance_per_position_conditional_and_unconditional() -> None:
    found = metric("acceptance_per_position").compute(steps=[FIRST, SECOND])
    # Depth 1: 2 of 4 steps, of 3 that drafted; depth 2: 2 of 2 that came so far; 3: 1 of 2; 4: nobody came, one was
    # refused at depth 3 and the other drafted no deeper.
    assert found["acceptance_at_unconditional"] == [2 / 4, 2 / 4, 1 / 4, 0]
    assert found["acceptance_at_conditional"] == [pytest.approx(2 / 3), 1.0, 1 / 2, None]


def test_cut_counts_the_tokens_before_it() -> None:
    # Prefill's token and one of the three of the first step, of the second request all.
    found = metric("acceptance_length").compute(steps=[FIRST, SECOND], cut=[2, None])
    assert found["acceptance_length"] == (1 + 3) / 2
    found = metric("acceptance_rate").compute(steps=[FIRST, SECOND], cut=[2, 1])
    assert found["acceptance_rate"] == 1 / 4
    with pytest.raises(InputError, match="1 entries for 2 requests"):
        metric("acceptance_rate").compute(steps=[FIRST, SECOND], cut=[2])
    with pytest.raises(InputError, match="request 0: cut=-1"):
        metric("acceptance_rate").compute(steps=[FIRST], cut=[-1])


@pytest.mark.parametrize(
    "step", [[4, 4, 5, 6], [4, 5, 4, 5], [4, 4, 2, 4], [4, 4, 2, 1], [0, 0, 0, 0], [4, 4, -1, 0], [4, 4, 2]]
)
def test_impossible_steps_are_refused(step: list[int]) -> None:
    for name in ("acceptance_rate", "acceptance_length", "acceptance_per_position"):
        with pytest.raises(InputError, match=r"request 1, step 0: \["):
            metric(name).compute(steps=[FIRST, [step]])


def test_a_metric_works_on_after_an_error() -> None:
    own = metric("acceptance_rate")
    with pytest.raises(InputError):
        own.compute(steps=[[[1, 1, 2, 3]]])
    assert own.compute(steps=[[[2, 2, 1, 2]]])["acceptance_rate"] == 1 / 2


def test_exact_match_needs_every_token_up_to_eos() -> None:
    own = metric("exact_match_rate")
    assert own.compute(**INPUTS_OF["exact_match_rate"])["exact_match_rate"] == 1 / 2
    answers, references = [[5, 0, 7], [5, 6]], [[5, 0, 8], [5, 6, 0]]
    assert own.compute(predictions=answers, references=references)["exact_match_rate"] == 0.0
    assert own.compute(predictions=answers, references=references, eos_token_id=0)["exact_match_rate"] == 1 / 2
    assert own.compute(predictions=answers, references=references, eos_token_id=[0, 5])["exact_match_rate"] == 1.0
    all_equal = own.compute(predictions=[[1]] * 20, references=[[1]] * 20)  # as 2.5 % of the time at the low end
    assert all_equal["exact_match_rate_low"] == pytest.approx(0.025 ** (1 / 20))
    assert all_equal["exact_match_rate_high"] == 1.0
    with pytest.raises(ConfigError, match="eos_token_id='x'"):
        own.compute(predictions=answers, references=references, eos_token_id="x")


def test_first_divergence_of_shorter_answers_is_their_end() -> None:
    found = metric("first_divergence").compute(
        predictions=[[1, 2, 3], [9, 2], [1, 2], [1, 2, 3, 4], []], references=[[1, 2, 3], [1, 2], [1, 2, 3], [1], []]
    )
    assert found["first_divergence"] == [None, 0, 2, 1, None]
    assert found["first_divergence_median"] == 1
    assert found["num_diverged"] == 3
    assert found["leading_share"] == (3 + 0 + 2 + 1 + 0) / (3 + 2 + 3 + 4 + 0)
    past = metric("first_divergence").compute(predictions=[[1, 0, 5]], references=[[1, 0, 6]], eos_token_id=0)
    assert (past["first_divergence"], past["leading_share"]) == ([None], 1.0)


def test_speedup_is_per_token_and_the_median_of_medians() -> None:
    found = metric("speedup").compute(**INPUTS_OF["speedup"])
    # 2, 2, 8 -> 2; 3, 5, 4 -> 4; 6 s for 30 tokens over 2 s for 10: 1
    assert found["speedup_per_prompt"] == pytest.approx([2.0, 4.0, 1.0])
    assert found["speedup"] == 2.0
    assert (found["speedup_low"], found["speedup_high"]) == (None, None)  # of three prompts
    wide = metric("speedup").compute(**INPUTS_OF["speedup"], level=0.75)
    assert (wide["speedup_low"], wide["speedup_high"]) == (1.0, 4.0)
    narrow = metric("speedup").compute(**INPUTS_OF["speedup"], level=0.01)
    assert (narrow["speedup_low"], narrow["speedup_high"]) == (1.0, 4.0)  # the next one is a point, which never holds
    alone = {name: column[:1] for name, column in INPUTS_OF["speedup"].items()}
    found = metric("speedup").compute(**alone)
    assert (found["speedup"], found["speedup_low"]) == (2.0, None)
    with pytest.raises(InputError, match=r"row 0: variant made 10 tokens in 0\.0 s"):
        metric("speedup").compute(**alone | {"variant_s": [0.0]})


def test_sample_distance_by_hand() -> None:
    found = metric("sample_distance").compute(**INPUTS_OF["sample_distance"])
    # 1/2 1/2 0 against 1/2 0 1/2; smoothed with half a count each: 5/11 5/11 1/11 against 3/7 1/7 3/7
    assert found["sample_total_variation"] == 1 / 2
    p, q = (3 / 7, 1 / 7, 3 / 7), (5 / 11, 5 / 11, 1 / 11)
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert found["sample_kl_divergence"] == pytest.approx(divergence)
    assert 0 < found["sample_total_variation_null"] < 1


def test_sample_distance_tells_chance_from_difference() -> None:
    same = [[[i % 3, 7] for i in range(60)]]
    found = metric("sample_distance").compute(predicted_samples=same, reference_samples=same)
    assert found["sample_total_variation"] == found["sample_kl_divergence"] == 0.0
    assert found["sample_p_value"] == 1.0
    assert found["sample_total_variation_null"] > 0
    other = [[[i % 2, 7] for i in range(60)]]
    found = metric("sample_distance").compute(predicted_samples=same, reference_samples=other)
    assert found["sample_total_variation"] == pytest.approx(1 / 3)
    assert 1 / 201 <= found["sample_p_value"] < 0.05
    assert found["sample_total_variation"] > 2 * found["sample_total_variation_null"]


def test_sample_distance_of_first_tokens_and_up_to_eos() -> None:
    one, two = [[[1, 0, 5], [1, 2, 3]]], [[[1, 0, 6], [1, 2, 4]]]
    own = metric("sample_distance")
    distance = "sample_total_variation"
    assert own.compute(predicted_samples=one, reference_samples=two)[distance] == 1.0
    assert own.compute(predicted_samples=one, reference_samples=two, eos_token_id=0)[distance] == 1 / 2
    assert own.compute(predicted_samples=one, reference_samples=two, num_tokens=2)[distance] == 0.0
    with pytest.raises(ConfigError, match="num_tokens=0"):
        own.compute(predicted_samples=one, reference_samples=two, num_tokens=0)
    with pytest.raises(InputError, match="prompt 1 has 1 and 0 samples"):
        own.compute(predicted_samples=[[[1]], [[1]]], reference_samples=[[[1]], []])


def test_logprob_distance_by_hand() -> None:
    found = metric("logprob_distance").compute(**INPUTS_OF["logprob_distance"])
    assert found["logprob_total_variation"] == pytest.approx((0.25 + 0.25) / 2)
    assert found["logprob_kl_divergence"] == pytest.approx(0.5 * math.log(2))
    turned = metric("logprob_distance").compute(
        predicted_logprobs=INPUTS_OF["logprob_distance"]["reference_logprobs"],
        reference_logprobs=INPUTS_OF["logprob_distance"]["predicted_logprobs"],
    )
    assert turned["logprob_kl_divergence"] == math.inf
    row = [math.log(0.5), math.log(0.5)]
    two = metric("logprob_distance").compute(predicted_logprobs=[row, row], reference_logprobs=[row, [0.0, -math.inf]])
    assert two["logprob_total_variation"] == pytest.approx(1 / 4)
    assert two["logprob_total_variation_max"] == pytest.approx(1 / 2)


def test_logprob_distance_counts_nothing_for_what_never_comes() -> None:
    """exp(-800) is 0 in float64, so a finite log-probability may be of a token that the reference never draws."""
    never = {"predicted_logprobs": [[0.0, -math.inf]], "reference_logprobs": [[0.0, -800.0]]}
    found = metric("logprob_distance").compute(**never)
    assert (found["logprob_kl_divergence"], found["logprob_total_variation"]) == (0.0, 0.0)


@pytest.mark.parametrize("row", [[0.5, 0.5], [math.nan, 0.0], [-1.0, -9.0], []])
def test_rows_that_are_no_distribution_are_refused(row: list[float]) -> None:
    with pytest.raises(InputError, match="is no distribution"):
        metric("logprob_distance").compute(predicted_logprobs=[row], reference_logprobs=[[0.0, -math.inf]])


def test_rows_over_other_vocabularies_are_refused() -> None:
    with pytest.raises(InputError, match="1 predicted and 2 reference"):
        metric("logprob_distance").compute(predicted_logprobs=[[0.0]], reference_logprobs=[[0.0, -math.inf]])


@pytest.mark.parametrize("name", METRICS)
def test_empty_input_gives_none(name: str) -> None:
    found = metric(name).compute(**{column: [] for column in INPUTS_OF[name]})
    assert found.keys() == metric(name).compute(**INPUTS_OF[name]).keys()
    assert all(value in (None, [], 0) for value in found.values())


@pytest.mark.parametrize("name", METRICS)
def test_unknown_options_and_bad_levels_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has no option 'levels'"):
        metric(name).compute(**INPUTS_OF[name], levels=0.9)
    if name in ("acceptance_rate", "acceptance_length", "exact_match_rate", "first_divergence", "speedup"):
        for level in (0, 1, 95, "x"):
            with pytest.raises(ConfigError, match="level="):
                metric(name).compute(**INPUTS_OF[name], level=level)


def test_rows_can_be_added_one_by_one() -> None:
    own = metric("acceptance_rate")
    own.add(steps=FIRST)
    own.add_batch(steps=[SECOND])
    assert own.compute()["acceptance_rate"] == pytest.approx(5 / 14)
    assert own.compute(steps=[SECOND])["acceptance_rate"] == 1 / 2  # what was counted is gone


def test_loaded_by_path_and_combined_they_give_what_the_classes_give() -> None:
    alone = [metric(name).compute(**INPUTS_OF[name]) for name in METRICS]
    keys = [key for found in alone for key in found]
    assert len(keys) == len(set(keys)), "combine renames values that two metrics name alike"
    paths = [metric_path(name) for name in METRICS]
    everything = {name: column for inputs in INPUTS_OF.values() for name, column in inputs.items()}
    combined = evaluate.combine(paths)
    assert [module.name for module in combined.evaluation_modules] == list(METRICS)
    assert combined.compute(**everything) == {key: value for found in alone for key, value in found.items()}
    narrow = evaluate.combine(paths).compute(**everything, level=0.5)
    assert (narrow["speedup_low"], narrow["speedup_high"]) == (1.0, 4.0)  # of three prompts, too few for 95 %
    assert combined.compute(**everything)["speedup_low"] is None
    with pytest.raises(ConfigError, match="has no option 'levels'"):
        evaluate.combine(paths).compute(**everything, levels=0.5)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="metric 'speed' is unknown; available: acceptance_rate"):
        metric_path("speed")
    with pytest.raises(AttributeError, match="has no attribute 'Speed'"):
        _ = metrics.Speed


SCRIPT = """
import evaluate
from specdec.eval.metrics import metric_path
own = evaluate.combine([metric_path(name) for name in ("acceptance_rate", "acceptance_length")])
for _ in range(5):
    print(own.compute(steps=[[[4, 4, 2, 3]]]))
"""


def test_several_processes_share_an_empty_home(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    environment = kept | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * 3, outputs
    assert {line for out, _ in outputs for line in out.decode().splitlines()} == {
        "{'acceptance_rate': 0.5, 'acceptance_rate_low': None, 'acceptance_rate_high': None, "
        "'acceptance_rate_macro': 0.5, 'acceptance_length': 3.0, 'acceptance_length_low': None, "
        "'acceptance_length_high': None, 'acceptance_length_macro': 3.0}"
    }
    assert (tmp_path / ".cache/huggingface").is_dir()
