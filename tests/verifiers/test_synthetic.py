"""The lossy verifier for measurements accepts what it says it does."""

from __future__ import annotations

import pytest
import torch

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.noise import KeyedNoise
from specdec.tree import chain, stack_trees
from specdec.verifiers.synthetic import SyntheticVerifier
from tests.decoding import add, drain, engine_of, prompts, reference
from tests.models.architectures import model_of, named
from tests.verifiers.enumeration import TableTarget

BATCH = 20_000


def noise_of(batch: int) -> KeyedNoise:
    return KeyedNoise(torch.arange(batch), torch.full((batch,), 7), torch.zeros(batch, dtype=torch.bool))


def test_chains_are_accepted_at_the_rate() -> None:
    tree = chain(
        torch.zeros(BATCH, dtype=torch.int64), torch.ones(BATCH, 3, dtype=torch.int64), torch.full((BATCH,), 3)
    )
    target = TableTarget(torch.eye(4), tree.token_ids)
    result = SyntheticVerifier(0.6).verify(tree, target, noise_of(BATCH))
    share = [float((result.num_accepted >= n).double().mean()) for n in (1, 2, 3)]
    assert share == pytest.approx([0.6, 0.36, 0.216], abs=0.012)


def test_siblings_are_tried_in_order() -> None:
    tree = stack_trees([([0, 1, 2], [-1, 0, 0])] * BATCH)
    result = SyntheticVerifier(0.5).verify(tree, TableTarget(torch.eye(4), tree.token_ids), noise_of(BATCH))
    share = [float((result.path[:, 0] == node).double().mean()) for node in (1, 2, -1)]
    assert share == pytest.approx([0.5, 0.25, 0.25], abs=0.012)


def test_the_next_token_is_the_targets_own() -> None:
    tree = chain(torch.tensor([0, 0]), torch.tensor([[2, 3], [2, 3]]), torch.tensor([2, 0]))
    table = torch.eye(4).roll(1, dims=1)  # after t comes t + 1
    for greedy in (True, False):
        result = SyntheticVerifier(1.0).verify(tree, TableTarget(table, tree.token_ids, greedy), noise_of(2))
        assert result.num_accepted.tolist() == [2, 0]
        assert result.next_token_ids.tolist() == [0, 1]


@pytest.mark.parametrize("rate", [-0.1, 1.1, "high", True, float("nan")])
def test_rates_that_are_none_are_refused(rate: object) -> None:
    with pytest.raises(ConfigError, match=r"rate=.*allowed: a probability"):
        SyntheticVerifier(rate)  # type: ignore[arg-type]


def test_at_rate_zero_nothing_changes() -> None:
    model = model_of(named("llama"))
    engine = engine_of(model, "random", verifier=SyntheticVerifier(0.0))
    request = add(engine, prompts(5)[0], 12)
    drain(engine)
    assert request.new_tokens == reference(model, prompts(5)[0], 12)
    assert request.stats.acceptance_rate == 0.0


def test_it_is_not_lossless_and_says_so() -> None:
    llm = LLM(model_of(named("llama")), drafter="random", verifier="synthetic")
    assert not llm.engine.verifiers.greedy.lossless
    done = llm.generate([3, 4, 5], max_new_tokens=30, ignore_eos=True)[0]
    assert done.stats.acceptance_rate is not None
    assert done.stats.acceptance_rate > 0.1, "random tokens are never the target's"
