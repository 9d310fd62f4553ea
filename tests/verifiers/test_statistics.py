"""The law of three tokens with the real sampler and the real noise, 2e5 requests per case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.interfaces import SamplingParams, Verifier
from specdec.noise import KeyedNoise
from specdec.sampling import probabilities
from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier
from tests.verifiers.enumeration import sample_tokens, sequences_p_value

VERIFIERS = [MatchVerifier(), RejectionVerifier()]
ids = [verifier.name for verifier in VERIFIERS]

# Asymmetric, after each of four tokens; the likely tokens of both differ.
TARGET_LOGITS = torch.tensor(
    [[2.0, 0.5, -0.5, 1.0], [0.0, 1.5, 1.0, -1.0], [0.3, 0.2, 0.1, 0.0], [-1.0, 2.0, 0.0, 1.0]]
)
DRAFT_LOGITS = torch.tensor([[0.5, 1.0, 0.0, 1.5], [1.0, 0.0, 1.5, 0.5], [1.0, -1.0, 0.5, 0.0], [0.0, 1.0, 1.5, -0.5]])

PLAIN = SamplingParams(temperature=1.0)
FILTERS = {
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.35),
}
SIDES = ["draft only", "target only", "both"]
THRESHOLD = 1e-4


def rows(logits: Tensor, params: SamplingParams) -> Tensor:
    return probabilities(logits, [params] * logits.shape[0])


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FILTERS)
def test_fault_02_filters_on_either_side(verifier: Verifier, side: str, name: str) -> None:
    target = rows(TARGET_LOGITS, FILTERS[name] if side != "draft only" else PLAIN)
    draft = rows(DRAFT_LOGITS, FILTERS[name] if side != "target only" else PLAIN)
    run = sample_tokens(verifier, target, draft, coupled=verifier.couples_draft)
    assert sequences_p_value(run.tokens, target) > THRESHOLD


@pytest.mark.parametrize("verifier", VERIFIERS, ids=ids)
@pytest.mark.parametrize("shape", [[2, 1], [3], [1, 2]], ids=str)
def test_sampled_trees(verifier: Verifier, shape: list[int]) -> None:
    target, draft = rows(TARGET_LOGITS, FILTERS["top_k"]), rows(DRAFT_LOGITS, FILTERS["hot"])
    run = sample_tokens(verifier, target, draft, shape, coupled=verifier.couples_draft)
    assert sequences_p_value(run.tokens, target) > THRESHOLD


def test_fault_02_a_draft_that_was_not_drawn_from_draft_probs_is_detected() -> None:
    target, drawn, claimed = rows(TARGET_LOGITS, PLAIN), rows(DRAFT_LOGITS, FILTERS["cold"]), rows(DRAFT_LOGITS, PLAIN)
    wrong = sample_tokens(RejectionVerifier(), target, drawn, claimed=claimed)
    assert sequences_p_value(wrong.tokens, target) < 1e-12


def test_a_small_bias_is_detected() -> None:
    """Power: one per cent of one token's probability."""
    target = rows(TARGET_LOGITS, PLAIN)
    biased = target.clone()
    biased[0] += torch.tensor([-0.01, 0.01, 0.0, 0.0])
    run = sample_tokens(RejectionVerifier(), biased, rows(DRAFT_LOGITS, PLAIN))
    assert sequences_p_value(run.tokens, target) < THRESHOLD


def test_fault_05_measured_acceptance_is_the_overlap() -> None:
    target, draft = rows(TARGET_LOGITS, PLAIN), rows(DRAFT_LOGITS, PLAIN)
    overlap = torch.minimum(target[0], draft[0]).sum()
    product = (target[0] * draft[0]).sum()
    for verifier, expected in ((RejectionVerifier(), overlap), (MatchVerifier(), product)):
        run = sample_tokens(verifier, target, draft, shape=[1], length=1)
        assert float(run.first_accepted.double().mean()) == pytest.approx(float(expected), abs=5 * 0.5 / 200_000**0.5)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("shape", [[1], [1, 1, 1], [2, 2], [3, 1]], ids=str)
def test_match_equals_the_undrafted_run_token_by_token(coupled: bool, shape: list[int]) -> None:
    target, draft = rows(TARGET_LOGITS, PLAIN), rows(DRAFT_LOGITS, PLAIN)
    plain = sample_tokens(MatchVerifier(), target, draft, shape=[], batch=2000, length=8)
    drafted = sample_tokens(MatchVerifier(), target, draft, shape, coupled=coupled, batch=2000, length=8)
    assert torch.equal(drafted.tokens, plain.tokens)


def test_coupled_drafts_are_accepted_more_often() -> None:
    """At least (1 - TV) / (1 + TV) of them. Source: Daliri, Musco and Suresh 2024, arXiv 2408.07978."""
    target, draft = rows(TARGET_LOGITS, PLAIN), rows(DRAFT_LOGITS, PLAIN)
    distance = 0.5 * (target[0] - draft[0]).abs().sum()
    coupled, apart = (
        sample_tokens(MatchVerifier(), target, draft, shape=[1], coupled=coupled, length=1).first_accepted
        for coupled in (True, False)
    )
    bound = float((1 - distance) / (1 + distance))
    assert coupled.double().mean() > max(bound - 0.005, apart.double().mean() + 0.05)


def test_a_drafter_equal_to_the_target_accepts_everything() -> None:
    target = rows(TARGET_LOGITS, PLAIN)
    for verifier in VERIFIERS:
        run = sample_tokens(verifier, target, target, shape=[1, 1, 1], coupled=verifier.couples_draft, batch=5000)
        assert bool((run.first_accepted == 3).all())


def test_rejection_leaves_the_seed_of_one_request_alone_in_its_batch() -> None:
    """Seeds are numbered by row, so a larger batch begins with the smaller one."""
    target, draft = rows(TARGET_LOGITS, PLAIN), rows(DRAFT_LOGITS, PLAIN)
    few = sample_tokens(RejectionVerifier(), target, draft, [2, 1], batch=10, length=6)
    many = sample_tokens(RejectionVerifier(), target, draft, [2, 1], batch=1000, length=6)
    assert torch.equal(many.tokens[:10], few.tokens)


def test_wrapping_noise_reaches_every_step() -> None:
    positions: list[int] = []

    def record(noise: KeyedNoise) -> KeyedNoise:
        positions.append(len(positions))
        return noise

    target = rows(TARGET_LOGITS, PLAIN)
    sample_tokens(MatchVerifier(), target, target, shape=[], batch=4, length=3, wrap=record)
    assert positions == [0, 1, 2]
