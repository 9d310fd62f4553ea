"""Traversal: block verification on chains, never shorter than rejection, and fresh draws in every step.

That its output has the target's law is in test_exact, with the other rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.interfaces import Noise, NoiseKey, SamplingParams, Stream, TargetRows, TokenTree, Verifier, VerifyResult
from specdec.noise import KeyedNoise
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.traversal import TraversalVerifier
from tests.decoding import add, drain, engine_of, prompts, reference
from tests.models.architectures import model_of, named
from tests.verifiers.enumeration import (
    Drawing,
    Law,
    Model,
    drafts,
    most_likely,
    random_model,
    sample_tokens,
    sequences_p_value,
    step_law,
    total_variation,
    with_replacement,
    without_replacement,
)

THIRDS = Model([[Fraction(1), Fraction(2)]] * 2, [[Fraction(2), Fraction(1)]] * 2)  # weights: exact in floats


class BlockVerifier:
    """Block verification as published, one row at a time: an independent statement of traversal's chain case.

    Every draft token is judged; the last one that passes ends the block. Source: Sun et al. 2024, arXiv 2403.10444,
    algorithm 2.
    """

    name = "block"
    lossless = True
    needs_all_rows = True
    couples_draft = False

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        width = tree.token_ids.shape[1] - 1
        blocks = [self._block(tree, row, target, noise) for row in range(tree.num_nodes.shape[0])]
        return VerifyResult(
            path=torch.tensor([[n + 1 if n < length else -1 for n in range(width)] for length, _ in blocks]),
            num_accepted=torch.tensor([length for length, _ in blocks]),
            next_token_ids=torch.tensor([token for _, token in blocks]),
        )

    def _block(self, tree: TokenTree, row: int, target: TargetRows, noise: Noise) -> tuple[int, int]:
        here, num_draft = torch.tensor([row]), int(tree.num_nodes[row]) - 1
        assert tree.draft_probs is not None
        assert tree.draft_row is not None
        ratio, length, left = 1.0, 0, None
        for node in range(num_draft + 1):
            p = target.probs(here, torch.tensor([node]))[0].double()
            p = p / p.sum()
            if node == num_draft:
                passes, rest = ratio, p
            else:
                q = tree.draft_probs[tree.draft_row[row, node]].double()
                q = q / q.sum()
                rest = (ratio * p - q).clamp_min(0)
                mass = float(rest.sum())
                passes = 0.0 if mass == 0 else mass / (mass + 1 - ratio)
            if node == 0 or self._passes(passes, here, node, noise):
                length, left = node, rest
            if node < num_draft:
                token = tree.token_ids[row, node + 1]
                ratio = min(1.0, ratio * float(p[token] / q[token]))
        assert left is not None
        left = left if left.sum() > 0 else p
        return length, int(noise.choose(left[None], NoiseKey(here, length + 1, Stream.RESIDUAL)))

    def _passes(self, prob: float, row: Tensor, node: int, noise: Noise) -> bool:
        num = torch.tensor([prob], dtype=torch.float64)
        return bool(noise.accept(num, torch.ones_like(num), NoiseKey(row, 0, Stream.PATH, node)))


def law(verifier: Verifier, model: Model, shape: list[int], drawing: Drawing) -> Law:
    """Return the law of the blocks of one step."""
    point_masses = drawing is most_likely
    trees = drafts(model, 0, shape, drawing, lambda depth: not point_masses)
    return step_law(verifier, model, trees, drawing is with_replacement, point_masses=point_masses).blocks


def accepted(blocks: Law) -> Fraction:
    return sum((prob * (len(block) - 1) for block, prob in blocks.items()), Fraction(0))


def test_the_published_example() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two draft tokens: 11/9 accepted ones, against 10/9 token by token."""
    found = {
        rule.name: law(rule, THIRDS, [1, 1], without_replacement) for rule in (TraversalVerifier(), RejectionVerifier())
    }
    assert all(sum(blocks.values()) == 1 for blocks in found.values())
    assert {name: accepted(blocks) for name, blocks in found.items()} == {
        "traversal": Fraction(11, 9),
        "rejection": Fraction(10, 9),
    }


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_chain_is_block_verification(length: int) -> None:
    """The same law of blocks, lengths included; the ratios of the other implementation are rounded."""
    for seed in range(3):
        model = random_model(seed, vocab_size=3)
        ours, theirs = (
            law(rule, model, [1] * length, with_replacement) for rule in (TraversalVerifier(), BlockVerifier())
        )
        assert total_variation(ours, theirs) < Fraction(1, 10**12)


@pytest.mark.parametrize("drawing", [with_replacement, without_replacement, most_likely])
@pytest.mark.parametrize("shape", [[1, 1], [3], [2, 1], [1, 2], [2, 2]], ids=str)
def test_it_accepts_at_least_what_rejection_accepts(shape: list[int], drawing: Drawing) -> None:
    gains = []
    for seed in range(3):
        model = random_model(seed + 40, vocab_size=3)
        ours, theirs = (
            accepted(law(rule, model, shape, drawing)) for rule in (TraversalVerifier(), RejectionVerifier())
        )
        gains.append(ours - theirs)
    assert min(gains) >= 0
    assert (max(gains) > 0) == (len(shape) > 1 and drawing is not most_likely)


class Rekeyed:
    """KeyedNoise whose keys are changed first."""

    def __init__(self, noise: KeyedNoise, change: Callable[[NoiseKey], NoiseKey]) -> None:
        self.noise, self.change = noise, change

    def accept(self, num: Tensor, den: Tensor, key: NoiseKey) -> Tensor:
        return self.noise.accept(num, den, self.change(key))

    def choose(self, weights: Tensor, key: NoiseKey) -> Tensor:
        return self.noise.choose(weights, self.change(key))


def unchanged(key: NoiseKey) -> NoiseKey:
    return key


def paths_by_position(key: NoiseKey) -> NoiseKey:
    """Node n of a chain stands n positions after the root."""
    return replace(key, offset=key.index, index=0) if key.stream is Stream.PATH else key


def drafts_by_position(key: NoiseKey) -> NoiseKey:
    """Any stream but DRAFT is keyed by position alone."""
    return replace(key, stream=Stream.ACCEPT) if key.stream is Stream.DRAFT else key


def p_value(change: Callable[[NoiseKey], NoiseKey], shape: list[int], length: int) -> float:
    """Return the chi-square p-value of the first tokens of 1e5 requests."""
    target = torch.tensor([[1.0, 2.0, 5.0], [4.0, 3.0, 1.0], [2.0, 4.0, 2.0]]) / 8
    draft = torch.tensor([[5.0, 2.0, 1.0], [1.0, 4.0, 3.0], [1.0, 1.0, 6.0]]) / 8
    run = sample_tokens(
        TraversalVerifier(), target, draft, shape, batch=100_000, length=length, wrap=lambda n: Rekeyed(n, change)
    )
    return sequences_p_value(run.tokens, target)


@pytest.mark.parametrize(("shape", "length"), [([1, 1], 7), ([2, 1], 7), ([1, 2], 7)], ids=str)
def test_the_law_over_at_least_three_steps_with_real_noise(shape: list[int], length: int) -> None:
    assert p_value(unchanged, shape, length) > 1e-4


@pytest.mark.parametrize("change", [paths_by_position, drafts_by_position])
def test_draws_that_the_next_step_meets_again_are_detected(change: Callable[[NoiseKey], NoiseKey]) -> None:
    """What a key by position alone does to a rule that looks behind the first refused token."""
    assert p_value(change, [1, 1], 5) < 1e-12


def test_a_ragged_batch_of_eight_through_the_engine() -> None:
    """Greedy requests among sampled ones, so that their trees are traversed with one-hot rows; then alone."""
    model = model_of(named("llama"))
    texts = prompts(1, 3, 5, 8, 13, 2, 7, 11)
    draft_model = ("draft_model", {"model": model_of(named("qwen2"))})
    for drafter, options in (("oracle", {"width": 2}), draft_model):
        for every in (1, 2):
            engine = engine_of(model, drafter, options, verifier="traversal")
            sampled = SamplingParams(temperature=1.0, seed=3)
            requests = [
                add(engine, text, 9 + i, **({} if i % every == 0 else {"sampling": sampled}))
                for i, text in enumerate(texts)
            ]
            drain(engine)
            for i in range(0, 8, every):
                assert requests[i].new_tokens == reference(model, texts[i], 9 + i)


def test_logits_processors_are_refused() -> None:
    engine = engine_of(model_of(named("llama")), "ngram", verifier="traversal")
    with pytest.raises(ConfigError, match="use verifier='match'"):
        add(engine, [3, 4], 3, sampling=SamplingParams(temperature=1.0, processors=(lambda ids, scores: scores,)))
