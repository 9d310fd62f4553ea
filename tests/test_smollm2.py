"""The real model: whatever drafts, the output is the target's own, and the drafts are as good as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from specdec import LLM
from specdec.debug.near_tie import NEAR_TIES
from specdec.eval.lossless import first_divergence
from specdec.eval.peers.hf import transformers_answer
from specdec.eval.prompts import encode, load_texts
from specdec.interfaces import FeatureSpec, Segment
from specdec.models.build import RunnerConfig, runner_for
from specdec.models.hosted import HostedProgram
from specdec.models.lean import LeanProgram
from specdec.stats import total

pytestmark = pytest.mark.slow

NUM_NEW = 48
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {},
    "self_int8": {},
    "oracle": {"accept_rate": 0.7},
    "draft_model": {},  # the target itself
    "random": {},
}


@pytest.fixture(scope="module")
def prompts(smollm2: tuple[Any, Any]) -> list[list[int]]:
    """Return the first four built-in prompts through the chat template: of unequal lengths."""
    with initialize_config_module("specdec.configs", version_base="1.3"):
        texts, _ = load_texts(compose("overhead", ["prompts=builtin"]).prompts)
    return encode(llm_of(smollm2, "none"), texts[:4], chat=True)


@pytest.fixture(scope="module")
def answers(smollm2: tuple[Any, Any], prompts: list[list[int]]) -> list[list[int]]:
    """Return what transformers' own greedy generate() says."""
    return [transformers_answer(smollm2[0], prompt, NUM_NEW) for prompt in prompts]


def llm_of(smollm2: tuple[Any, Any], drafter: str, options: dict[str, Any] | None = None, **more: Any) -> LLM:
    model, tokenizer = smollm2
    options = dict(DRAFTERS[drafter] if options is None else options)
    if drafter == "draft_model":
        options["model"] = model
    return LLM(model, tokenizer=tokenizer, drafter=drafter, drafter_options=options, **{"max_draft_tokens": 4, **more})


def assert_lossless(
    llm: LLM, prompts: Sequence[list[int]], answers: Sequence[list[int]], got: Sequence[list[int]]
) -> None:
    """Assert identity; one prompt may part where the two best logits nearly tie."""
    assert [len(ids) for ids in got] == [len(ids) for ids in answers]
    rows = zip(prompts, answers, got, strict=True)
    parted = [first_divergence(llm, i, *row, NEAR_TIES[torch.float32]) for i, row in enumerate(rows)]
    found = [p for p in parted if p is not None]
    assert all(p.is_near_tie for p in found) and len(found) <= 1, found


def test_the_model_says_something(answers: list[list[int]], prompts: list[list[int]]) -> None:
    assert len({len(prompt) for prompt in prompts}) == 4  # the batch is ragged
    assert {len(answer) for answer in answers} == {NUM_NEW}
    assert len({tuple(answer) for answer in answers}) == 4
    assert all(len(set(answer)) > 15 for answer in answers)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_ids_are_transformers(
    drafter: str, smollm2: tuple[Any, Any], prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Alone, and as one ragged batch."""
    llm = llm_of(smollm2, drafter)
    alone = [llm.generate(prompt, max_new_tokens=NUM_NEW, ignore_eos=True)[0] for prompt in prompts]
    assert_lossless(llm, prompts, answers, [c.token_ids for c in alone])
    together = llm.generate(prompts, max_new_tokens=NUM_NEW, ignore_eos=True)
    assert_lossless(llm, prompts, answers, [c.token_ids for c in together])
    whole = total(c.stats for c in alone)
    assert whole.num_emitted_tokens == 4 * (NUM_NEW - 1)
    assert whole.acceptance_length is not None
    if drafter == "self_int8":
        assert whole.acceptance_length >= 3.5  # 4.5 when this was written, of at most 4.7
    if drafter == "draft_model":
        assert whole.acceptance_rate is not None
        assert whole.acceptance_rate > 0.95  # the same model; near-ties apart everything is accepted
    if drafter == "oracle":
        # On average the sum of 0.7^i for i = 0 .. 4.
        assert 2.2 < whole.acceptance_length < 3.4


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize(
    ("drafter", "options", "max_draft_tokens"),
    [
        ("self_int8", {}, 4),
        ("oracle", {"accept_rate": 0.8, "width": 2}, 8),
        ("random", {"branching": [3, 2]}, 8),
    ],
    ids=["self_int8", "oracle_tree", "random_tree"],
)
def test_greedy_ids_by_verifier(
    drafter: str,
    options: dict[str, Any],
    max_draft_tokens: int,
    verifier: str,
    smollm2: tuple[Any, Any],
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    """Both rules, on trees too."""
    llm = llm_of(smollm2, drafter, options, verifier=verifier, max_draft_tokens=max_draft_tokens)
    got = llm.generate(prompts, max_new_tokens=NUM_NEW, ignore_eos=True)
    assert_lossless(llm, prompts, answers, [c.token_ids for c in got])
    assert total(c.stats for c in got).num_draft_tokens > 0


def test_a_seed_gives_the_same_ids_with_and_without_drafts(
    smollm2: tuple[Any, Any], prompts: list[list[int]], answers: list[list[int]]
) -> None:
    options = {"max_new_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    plain = llm_of(smollm2, "none").generate(prompts, **options)
    drafting = llm_of(smollm2, "self_int8", verifier="match")
    drafted = drafting.generate(prompts, **options)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert [c.token_ids for c in plain] != answers
    assert drafting.generate(prompts[2], **options)[0].token_ids == plain[2].token_ids
    # The int8 copy draws with the target's noise, so that it mostly draws the same token.
    whole = total(c.stats for c in drafted)
    assert whole.acceptance_length is not None
    assert whole.acceptance_length > 2.5


@pytest.mark.parametrize("lean", [True, False])
def test_features_are_the_models_hidden_states(lean: bool, smollm2: tuple[Any, Any], prompts: list[list[int]]) -> None:
    model = smollm2[0]
    # Without a choice of kernels the hosted program needs no timing of its own layers' shapes.
    runner = runner_for(model, RunnerConfig(lean=lean, kernels="auto" if lean else "off")).with_own_cache()
    assert type(runner.program) is (LeanProgram if lean else HostedProgram)
    spec = FeatureSpec(layers=(2, 15, 27), final_norm=True)
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    cache = runner.cache
    cache.open(0, len(ids))
    parts = []
    for chunk in ids.split(29):
        cache.reserve(0, len(chunk))
        taken = runner.forward([Segment(0, chunk, None, torch.tensor([len(chunk) - 1]))], spec).features
        assert taken is not None
        parts.append(taken)
        cache.commit(0, torch.arange(len(chunk)))
    assert len(parts) > 2
    with torch.inference_mode():
        states = model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    # The first state is the embedding, the last one has gone through the final norm.
    want = [states[layer + 1][0] for layer in spec.layers] + [states[-1][0]]
    got = torch.cat(parts).chunk(4, dim=-1)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("drafter", "options", "max_draft_tokens"),
    [("self_int8", {}, 4), ("oracle", {"accept_rate": 0.8}, 4), ("eagle3", {"tree": "dynamic"}, 24)],
    ids=["self_int8", "oracle", "eagle3_tree"],
)
def test_over_int8_keys_and_values_the_ids_are_those_without_drafts(
    drafter: str, options: dict[str, Any], max_draft_tokens: int, smollm2: tuple[Any, Any], prompts: list[list[int]]
) -> None:
    """Were the last bits of a row others in company, some numbers would be rounded to other codes."""
    many = {"max_new_tokens": 64, "ignore_eos": True}
    plain = llm_of(smollm2, "none", kv_dtype="int8")
    answers = [plain.generate(prompt, **many)[0].token_ids for prompt in prompts]
    llm = llm_of(smollm2, drafter, options, max_draft_tokens=max_draft_tokens, kv_dtype="int8")
    assert [llm.generate(prompt, **many)[0].token_ids for prompt in prompts] == answers
    assert [done.token_ids for done in llm.generate(prompts, **many)] == answers
