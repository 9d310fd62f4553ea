"""Probabilities have the kept sets of transformers' warpers, for every combination of filters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.errors import ConfigError
from specdec.interfaces import NoiseKey, SamplingParams, Stream
from specdec.noise import KeyedNoise
from specdec.sampling import apply_processors, check_sampling, probabilities
from tests.verifiers.enumeration import chi_square_p


def warped(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return transformers' probabilities; filters that are off are left out, as in its generate()."""
    warpers: list[Any] = []
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = logits.float()
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(dim=-1)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.5, 4.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.97, 0.9, 0.61, 0.33, 0.05, 1e-4]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.45, 1.0]),
)


def is_near_a_threshold(logits: Tensor, params: SamplingParams) -> bool:
    """Whether top-p or min-p is decided by less than float32 rounding, by the float64 distribution."""
    scores = logits.double() / params.temperature
    if params.top_k:
        kth = scores.topk(min(params.top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    near = False
    if params.top_p < 1.0:
        ascending = scores.sort(dim=-1).values
        below = ascending.softmax(-1).cumsum(-1)
        near |= bool((below - (1 - params.top_p)).abs().min() < 1e-5)
        removed = (below <= 1 - params.top_p).sum(-1, keepdim=True).clamp_max(scores.shape[-1] - 1)
        scores = scores.masked_fill(scores < ascending.gather(-1, removed), -torch.inf)
    ratios = scores.softmax(-1) / scores.softmax(-1).amax(-1, keepdim=True)
    return near or (0.0 < params.min_p < 1.0 and bool((ratios - params.min_p).abs().min() < 1e-5))


def assert_same(logits: Tensor, params: SamplingParams) -> None:
    ours, theirs = probabilities(logits, [params] * logits.shape[0]), warped(logits, params)
    assert ours.dtype == torch.float32
    # Which of equal logits survive top-p is left open by an unstable sort: compare what is kept of each value.
    order = torch.argsort(logits, dim=-1, stable=True)
    ours, theirs, ordered = (values.gather(1, order) for values in (ours, theirs, logits))
    for row in range(logits.shape[0]):
        for value in ordered[row].unique():
            same = ordered[row] == value
            assert sorted((ours[row, same] > 0).tolist()) == sorted((theirs[row, same] > 0).tolist())
    torch.testing.assert_close(ours.sort(dim=-1).values, theirs.sort(dim=-1).values, rtol=2e-5, atol=1e-9)


@settings(deadline=None, max_examples=300)
@given(params=PARAMS, seed=st.integers(0, 10**6), size=st.sampled_from([2, 5, 40, 300]), spread=st.sampled_from([1, 4]))
def test_fault_02_same_kept_sets_as_transformers(params: SamplingParams, seed: int, size: int, spread: int) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * spread
    if not is_near_a_threshold(logits, params):
        assert_same(logits, params)
        assert torch.equal(probabilities(logits, [params]) > 0, warped(logits, params) > 0)


@settings(deadline=None, max_examples=300)
@given(params=PARAMS, values=st.lists(st.integers(-3, 3), min_size=2, max_size=24))
def test_same_kept_sets_with_ties(params: SamplingParams, values: list[int]) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    if not is_near_a_threshold(logits, params):
        assert_same(logits, params)


@pytest.mark.parametrize("top_k", [0, 3, 4, 10])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_ties_exactly_at_the_top_p_threshold(top_k: int, top_p: float) -> None:
    """Four equal tokens are 1/4 each: `<=` decides, and the first tokens are the ones kept."""
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    logits = torch.tensor([[-math.inf, 2.0, 2.0, -math.inf, 2.0, 2.0]])
    assert_same(logits, params)
    kept = (probabilities(logits, [params])[0] > 0).nonzero()[:, 0].tolist()
    assert kept == [1, 2, 4, 5][: round(4 * top_p)]


def test_ties_at_the_kth_logit_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert_same(logits, SamplingParams(temperature=1.0, top_k=2))
    assert (probabilities(logits, [SamplingParams(temperature=1.0, top_k=2)] * 2) > 0).sum(1).tolist() == [4, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_cast_to_float32_first(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_k=7, top_p=0.9, min_p=0.02)):
        assert torch.equal(probabilities(logits, [params] * 3), probabilities(logits.float(), [params] * 3))
    assert_same(logits, SamplingParams(temperature=0.7))


def test_a_large_vocabulary() -> None:
    """Of thousands of tokens of 1e-5 each, the last one or two kept are decided by rounding of a float32 sum."""
    generator = torch.Generator().manual_seed(1)
    for spread in (0.1, 1.0, 6.0):
        logits = torch.randn(2, 20_000, generator=generator) * spread
        for top_k, top_p, min_p in ((0, 0.9, 0.0), (50, 0.8, 0.0), (0, 0.999, 0.01), (500, 1.0, 0.2)):
            params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
            ours, theirs = probabilities(logits, [params] * 2), warped(logits, params)
            assert int(((ours > 0) != (theirs > 0)).sum(dim=1).amax()) <= 2
            assert float((ours - theirs).abs().sum(dim=1).amax()) < 1e-4


@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-10, 1e-38, 5e-324])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    logits = torch.tensor([[-1e4, 3.0, 2.0, 1e4, -math.inf], [7.0, 7.0, 1.0, 0.0, -1.0]])
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=3, top_p=0.9),
    ):
        expected = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.0, 0.0, 0.0]])
        torch.testing.assert_close(probabilities(logits, [params] * 2), expected)


def test_greedy_is_the_first_argmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [4.0, 4.0, -math.inf]])
    assert probabilities(logits, [SamplingParams(top_k=2, top_p=0.5)] * 2).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_forbidden_tokens_stay_forbidden() -> None:
    logits = torch.randn(1, 30)
    logits[0, 3:] = -math.inf
    for params in (
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=1e-3),
        SamplingParams(temperature=1.0, top_k=10, top_p=0.99),
        SamplingParams(temperature=1.0, top_p=0.999, min_p=0.001),
    ):
        probs = probabilities(logits, [params])
        assert float(probs.sum()) == pytest.approx(1.0)
        assert not bool(probs[0, 3:].any())


def test_rows_with_different_parameters_are_what_they_are_alone() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5, seed=3),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
    ]
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(2)) * 3
    together = probabilities(logits, params)
    for row in range(6):
        assert torch.equal(together[row : row + 1], probabilities(logits[row : row + 1], params[row : row + 1]))


def test_no_rows() -> None:
    assert probabilities(torch.empty(0, 7), []).shape == (0, 7)


def test_logits_that_need_gradients_are_only_read() -> None:
    logits = torch.randn(1, 9, requires_grad=True)
    assert probabilities(logits, [SamplingParams(temperature=1.0, top_p=0.5)]).shape == (1, 9)


def test_one_set_of_parameters_per_row() -> None:
    with pytest.raises(ValueError, match="one SamplingParams per row"):
        probabilities(torch.zeros(2, 3), [SamplingParams()])


def test_nan_logits_do_not_become_a_token() -> None:
    """They stay visible: the engine refuses them by name, and noise refuses the row."""
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1e-4, min_p=0.1),
    ):
        assert bool(probabilities(torch.tensor([[0.0, math.nan, 1.0, 2.0]]), [params]).isnan().any())


def test_fault_04_equal_logits_at_temperature_one_give_every_token() -> None:
    rows = torch.arange(20_000)
    probs = probabilities(torch.zeros(1, 12), [SamplingParams(temperature=1.0)])
    noise = KeyedNoise(torch.zeros_like(rows), rows, torch.zeros_like(rows, dtype=torch.bool))
    chosen = noise.choose(probs.expand(20_000, -1), NoiseKey(rows, 1, Stream.TOKEN))
    assert chi_square_p(torch.bincount(chosen, minlength=12), torch.full((12,), 20_000 / 12)) > 1e-5


def test_processors_see_the_ids_and_cannot_touch_the_logits() -> None:
    class Ban(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, input_ids[0, -1]] = -math.inf
            return scores

    logits, ids = torch.tensor([[2.0, -2.0, 1.0]], dtype=torch.float32), torch.tensor([[1, 0]])
    result = apply_processors(logits, ids, [RepetitionPenaltyLogitsProcessor(2.0), Ban()])
    assert result.tolist() == [[-math.inf, -4.0, 1.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0]]
    assert apply_processors(logits.half(), ids, []).dtype == torch.float32


GOOD = [
    SamplingParams(),
    SamplingParams(temperature=1, top_k=50, top_p=1.0, min_p=1.0, seed=-1),
    SamplingParams(temperature=1e9, top_p=1e-9, seed=2**63 - 1),
]
BAD: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-0.1, math.nan, math.inf, "hot", None, True)),
    *({"top_p": value} for value in (0, 0.0, -0.5, 1.01, math.nan, None)),
    *({"min_p": value} for value in (-0.01, 1.5, math.nan)),
    *({"top_k": value} for value in (-1, 2.0, True, None)),
    *({"seed": value} for value in (1.0, "1", True, 2**63, -(2**63) - 1)),
]


@pytest.mark.parametrize("params", GOOD, ids=str)
def test_good_parameters(params: SamplingParams) -> None:
    check_sampling(params)


@pytest.mark.parametrize("options", BAD, ids=str)
def test_bad_parameters_are_named_with_what_is_allowed(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be .*got"):
        check_sampling(SamplingParams(**options))
