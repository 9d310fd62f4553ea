"""Chains drawn token by token, and where they stop when the draft is unsure."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from specdec.drafters.autoregression import draw_chain
from specdec.interfaces import DraftRequest, SamplingParams, TokenTree, Verifier
from specdec.noise import KeyedNoise
from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier
from tests.verifiers.enumeration import (
    Draft,
    Law,
    Model,
    drafts,
    joint_law,
    random_model,
    step_law,
    target_law,
    with_replacement,
)

# After token t the draft says t + 1, with this probability; the rest goes to token 0.
SURE = [0.9, 0.8, 0.3, 0.95, 0.9, 0.9]
VOCAB = 8
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, seed=0)


def row(last: int) -> Tensor:
    probs = torch.zeros(VOCAB)
    probs[last + 1] = SURE[last]
    probs[0] += 1 - SURE[last]
    return probs.log()


def chains(*requests: DraftRequest, calls: list[list[int]] | None = None) -> TokenTree:
    def advance(rows: list[int], last: Tensor) -> Tensor:
        if calls is not None:
            calls.append(rows)
        return torch.stack([row(int(token) if token < len(SURE) else 0) for token in last])

    count = torch.arange(len(requests))
    noise = KeyedNoise(count, count, torch.zeros(len(requests), dtype=torch.bool))
    return draw_chain(requests, noise, advance, VOCAB)


def request(most: int, least: float, sampling: SamplingParams = GREEDY, root: int = 0) -> DraftRequest:
    return DraftRequest(0, root, 5, most, sampling, least)


def test_the_token_that_triggers_the_stop_stays() -> None:
    tree = chains(request(5, 0.5))
    # 1 and 2 are likely; 0 is drawn after 2 with 0.7, the argmax, and 3 would have had 0.3.
    assert tree.token_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    tree = chains(request(5, 0.75))
    assert tree.token_ids.tolist() == [[0, 1, 2, 0]]
    assert tree.num_nodes.tolist() == [4]


def test_no_threshold_no_stop() -> None:
    assert chains(request(5, 0.0)).num_nodes.tolist() == [6]


def test_each_request_has_its_own_threshold_and_stops_alone() -> None:
    calls: list[list[int]] = []
    tree = chains(request(4, 0.85), request(4, 0.0), request(2, 0.85), request(4, 0.95), calls=calls)
    assert tree.num_nodes.tolist() == [3, 5, 3, 2]
    assert calls == [[0, 1, 2, 3], [0, 1, 2], [1], [1]]
    assert tree.token_ids.shape == (4, 5)


def test_all_stopped_ends_the_drafting() -> None:
    calls: list[list[int]] = []
    tree = chains(request(4, 0.95), request(4, 0.95), calls=calls)
    assert len(calls) == 1
    assert tree.token_ids.shape == (2, 2)


def test_sampled_requests_go_by_what_they_drew_from() -> None:
    """A token of probability 1 after top-k is sure, whatever the softmax said."""
    narrow = replace(SAMPLED, top_k=1)
    tree = chains(request(4, 0.99, narrow), request(4, 0.99, GREEDY))
    assert tree.num_nodes.tolist() == [5, 2]
    assert tree.draft_probs is not None
    assert tree.draft_row is not None
    assert tree.draft_row.shape == (2, 5)
    for seed in range(20):
        tree = chains(request(4, 0.5, replace(SAMPLED, seed=seed)))
        path = tree.token_ids[0].tolist()
        drawn = [float(row(a)[b].exp()) for a, b in itertools.pairwise(path)]
        assert all(p >= 0.5 for p in drawn[:-1])
        assert len(drawn) == 4 or drawn[-1] < 0.5
        assert tree.draft_probs is not None
        assert tree.draft_probs.shape[0] == len(drawn)


def stopped(model: Model, trees: list[Draft], least: Fraction, keep: bool = True) -> list[Draft]:
    """Return the chains ended at their first token below `least`, which stays unless not `keep`."""
    result = []
    for tree in trees:
        probs = [model.draft[c][t] for c, t in zip(tree.contexts, tree.token_ids[1:], strict=False)]
        end = next((i for i, p in enumerate(probs) if p < least), len(probs) - 1)
        n = end + 2 if keep or probs[end] >= least else end + 1
        result.append(
            Draft(
                tree.token_ids[:n],
                tree.parents[:n],
                tree.contexts[:n],
                (*tree.sampled[: n - 1], False),
                tree.prob,
            )
        )
    return result


def law_of(verifier: Verifier, model: Model, least: Fraction, keep: bool) -> Law:
    def step(context: int) -> Law:
        trees = stopped(model, drafts(model, context, [1] * 3, with_replacement), least, keep)
        return step_law(verifier, model, trees, replacement=True).blocks

    return joint_law(model, step, 0, 5)


@pytest.mark.parametrize("verifier", [MatchVerifier(), RejectionVerifier()], ids=lambda v: v.name)
@pytest.mark.parametrize("least", [Fraction(1, 4), Fraction(1, 2), Fraction(7, 8)])
def test_fault_02_a_confidence_stop_changes_no_distribution(verifier: Verifier, least: Fraction) -> None:
    for seed in range(4):
        model = random_model(seed=seed, vocab_size=3)
        law = law_of(verifier, model, least, keep=True)
        assert sum(law.values()) == 1
        assert law == target_law(model, 0, 5)


def test_dropping_the_unsure_token_would_bias() -> None:
    """The same check fails for a drafter that throws away what it is unsure of."""
    wrong = 0
    for seed in range(4):
        model = random_model(seed=seed, vocab_size=3)
        wrong += law_of(RejectionVerifier(), model, Fraction(1, 2), keep=False) != target_law(model, 0, 5)
    assert wrong
