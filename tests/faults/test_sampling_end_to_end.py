"""Faults 2 and 4: through generate(), tokens come with the target's own probabilities, and seeds mean something."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import specdec
from specdec.interfaces import SamplingParams
from specdec.sampling import probabilities
from tests.decoding import add, drain, engine_of, one, padded, prompts
from tests.models.architectures import build, model_of, named
from tests.verifiers.enumeration import chi_square_p

VOCAB = 6
NUM_SAMPLES = 2500
LENGTH = 3
PROMPT = [1, 4, 2]
THRESHOLD = 1e-4
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "top_k": 0},
    "cold": {"temperature": 0.6, "top_k": 0},
    "top_k": {"temperature": 1.3, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_k": 0, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "top_k": 0, "min_p": 0.2},
}


@cache
def pair() -> tuple[Any, Any]:
    """Return a target and a draft model of six tokens that disagree about the likely ones."""
    target, draft = (build(named("llama"), torch.float32, seed, vocab_size=VOCAB) for seed in (0, 1))
    for model in (target, draft):
        model.lm_head.weight.mul_(0.5)
    return target, draft


def law(options: dict[str, Any]) -> Tensor:
    """Return [V ** 3] expected counts of the next three tokens, from the model's own forward."""
    target, _ = pair()
    sequences = torch.tensor([[*PROMPT, *s] for s in itertools.product(range(VOCAB), repeat=LENGTH)])
    with torch.no_grad():
        logits = target(input_ids=sequences).logits
    mass = torch.ones(len(sequences), dtype=torch.float64)
    params = [SamplingParams(**options)] * len(sequences)
    for i in range(LENGTH):
        probs = probabilities(logits[:, len(PROMPT) - 1 + i], params).double()
        mass *= probs.gather(1, sequences[:, len(PROMPT) + i, None])[:, 0]
    return mass * NUM_SAMPLES


def sample(options: dict[str, Any], verifier: str, drafter: str = "draft_model", **more: Any) -> Tensor:
    """Return [V ** 3] counts of what generate() emitted."""
    target, draft = pair()
    torch.manual_seed(17)
    drafter_options = {"model": draft} if drafter == "draft_model" else more.pop("drafter_options", {})
    out = specdec.generate(
        target, one(PROMPT), do_sample=True, max_new_tokens=LENGTH, num_return_sequences=NUM_SAMPLES,
        drafter=drafter, drafter_options=drafter_options, verifier=verifier, max_batch_size=512,
        prefill_chunk_tokens=4096, **{"max_draft_tokens": 3, **options, **more},
    )  # fmt: skip
    digits = out[:, len(PROMPT) :]
    index = (digits * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)
    return torch.bincount(index, minlength=VOCAB**LENGTH)


@pytest.mark.parametrize("verifier", ["rejection", "match"])
@pytest.mark.parametrize("name", FILTERS)
def test_fault_02_the_law_of_three_tokens(name: str, verifier: str) -> None:
    assert chi_square_p(sample(FILTERS[name], verifier), law(FILTERS[name])) > THRESHOLD


@pytest.mark.parametrize("verifier", ["rejection", "match"])
def test_fault_02_sampled_trees(verifier: str) -> None:
    options = {"branching": [2, 1]}
    counts = sample(FILTERS["top_p"], verifier, "random", drafter_options=options)
    assert chi_square_p(counts, law(FILTERS["top_p"])) > THRESHOLD


def test_fault_02_the_test_can_fail() -> None:
    """A temperature one tenth off is found."""
    counts = sample({"temperature": 1.1, "top_k": 0}, "rejection")
    assert chi_square_p(counts, law({"temperature": 0.9})) < 1e-6


def test_fault_04_sampling_is_not_greedy() -> None:
    """Equal logits: every token appears, whatever drafts."""
    _, draft = pair()
    flat = build(named("llama"), torch.float32, vocab_size=VOCAB)
    flat.lm_head.weight.zero_()
    for drafter, options in (("none", {}), ("draft_model", {"model": draft}), ("ngram", {}), ("oracle", {})):
        torch.manual_seed(0)
        out = specdec.generate(
            flat, one(PROMPT), do_sample=True, temperature=1.0, max_new_tokens=60, drafter=drafter,
            drafter_options=options,
        )  # fmt: skip
        assert set(out[0, 3:].tolist()) == set(range(VOCAB))


class TestFault04Seeds:
    ROWS = prompts(3, 7, 12)
    SAMPLING = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
    DRAFTERS: ClassVar[dict[str, dict[str, Any]]] = {
        "none": {},
        "ngram": {},
        "oracle": {"accept_rate": 0.6, "width": 2},
        "random": {"branching": [3, 2]},
        "draft_model": {},
        "self_int8": {},
    }

    def ids(
        self, rows: list[list[int]], drafter: str = "none", seed: int | None = 11, **options: Any
    ) -> list[list[int]]:
        model = model_of(named("llama"))
        drafter_options = {"model": model_of(named("qwen2"))} if drafter == "draft_model" else self.DRAFTERS[drafter]
        ids, mask = padded(rows)
        out = specdec.generate(
            model, ids, mask, do_sample=True, top_k=0, top_p=0.95, max_new_tokens=15, seed=seed, drafter=drafter,
            drafter_options=drafter_options, **options,
        )  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_fault_04_the_same_ids_alone_and_in_a_batch(self, drafter: str) -> None:
        """And for every drafter and draft length: with a seed the output is the undrafted one's."""
        alone = [self.ids([row])[0] for row in self.ROWS]
        assert len({tuple(row) for row in alone}) == 3
        for most in (1, 3, 6):
            assert self.ids(self.ROWS, drafter, max_draft_tokens=most) == alone
        assert self.ids(self.ROWS[::-1], drafter, prefill_chunk_tokens=5) == alone[::-1]

    @pytest.mark.parametrize("drafter", ["none", "draft_model"])
    def test_fault_04_rejection_does_not_know_its_neighbours(self, drafter: str) -> None:
        alone = [self.ids([row], drafter, verifier="rejection")[0] for row in self.ROWS]
        assert self.ids(self.ROWS, drafter, verifier="rejection") == alone

    def test_fault_04_seeds_differ(self) -> None:
        seen = {tuple(self.ids(self.ROWS[:1], seed=seed)[0]) for seed in (0, 1, 2, -1, 2**63 - 1)}
        assert len(seen) == 5

    def test_fault_04_equal_prompts_in_a_batch_with_one_seed_are_equal(self) -> None:
        first, second = self.ids([self.ROWS[0], self.ROWS[0]], "draft_model")
        assert first == second

    def test_fault_04_return_sequences_differ_and_repeat(self) -> None:
        model = model_of(named("llama"))

        def run(count: int) -> list[list[int]]:
            return specdec.generate(
                model, one(self.ROWS[0]), do_sample=True, max_new_tokens=10, seed=3, num_return_sequences=count
            ).tolist()

        assert len({tuple(row) for row in run(4)}) == 4
        assert run(4)[:2] == run(2)

    def test_fault_04_without_a_seed_the_global_generator_decides(self) -> None:
        runs = []
        for manual in (5, 5, 6):
            torch.manual_seed(manual)
            runs.append(self.ids(self.ROWS, "draft_model", seed=None))
        assert runs[0] == runs[1] != runs[2]

    def test_fault_04_an_engine_keeps_requests_apart(self) -> None:
        """A request that joins later, beside others, draws what it draws alone."""
        engine = engine_of(model_of(named("llama")), "ngram")
        early = [
            add(engine, row, 25, sampling=SamplingParams(temperature=1.0, seed=i)) for i, row in enumerate(self.ROWS)
        ]
        engine.step()
        engine.step()
        late = add(engine, self.ROWS[1], 15, sampling=self.SAMPLING)
        drain(engine)
        assert late.new_tokens == self.ids([self.ROWS[1]])[0]
        assert all(len(r.new_tokens) == 25 for r in early)
