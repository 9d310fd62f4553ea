"""Faults 14 and 15: logits processors see the calls of plain decoding, whatever is drafted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import specdec
from specdec.errors import ModelOutputError
from tests.decoding import one, padded, prompts, reference
from tests.models.architectures import model_of, named

PROMPTS = prompts(3, 7, 12)
NUM_NEW = 16
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {},
    "oracle": {"accept_rate": 0.8},
    "adversary": {"width": 2},
    "random": {"branching": [3, 2]},
    "draft_model": {},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": [29, 1, 5, 44, 51]},
    "min_length": {"min_length": 15, "eos_token_id": [29, 1, 5, 44, 51]},
    "bad_words": {"bad_words_ids": [[51], [27, 7], [7, 7, 58]]},
    "suppress": {"suppress_tokens": [29, 1], "begin_suppress_tokens": [45, 51]},
    "sequence_bias": {"sequence_bias": [[[7], -30.0], [[3, 4], 30.0], [[40], 8.0]]},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 5},
    "forced_eos": {"forced_eos_token_id": 9},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[40]]},
}


def drafting(drafter: str) -> dict[str, Any]:
    options = {"model": model_of(named("qwen2"))} if drafter == "draft_model" else DRAFTERS[drafter]
    return {"drafter": drafter, "drafter_options": options, "max_draft_tokens": 5}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_fault_14_like_transformers(name: str, drafter: str) -> None:
    model, settings = model_of(named("llama")), SETTINGS[name]
    assert any(reference(model, p, NUM_NEW, **settings) != reference(model, p, NUM_NEW) for p in PROMPTS)
    for prompt in PROMPTS:
        want = reference(model, prompt, NUM_NEW, **settings)
        got = specdec.generate(
            model, one(prompt), max_new_tokens=NUM_NEW, do_sample=False, **settings, **drafting(drafter)
        )
        assert got[0, len(prompt) :].tolist() == want


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_14_rows_of_a_batch_count_their_own_tokens(drafter: str) -> None:
    """Padding is no token: penalties and lengths are those of each row alone."""
    model = model_of(named("llama"))
    settings = {**SETTINGS["several"], **SETTINGS["min_new_tokens"]}
    ids, mask = padded(PROMPTS)
    got = specdec.generate(model, ids, mask, max_new_tokens=NUM_NEW, do_sample=False, **settings, **drafting(drafter))
    for row, prompt in zip(got[:, ids.shape[1] :].tolist(), PROMPTS, strict=True):
        want = reference(model, prompt, NUM_NEW, **settings)
        assert row == want + [0] * (len(row) - len(want))


class Recorder(LogitsProcessor):
    """Writes down every prefix it is called with, and counts in a way that depends on being called once each."""

    def __init__(self) -> None:
        self.prefixes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes += [tuple(row) for row in input_ids.tolist()]
        scores = scores.clone()
        scores[:, (7 * len(self.prefixes)) % 64] += 5.0
        return scores


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 3, "top_k": 0}], ids=str)
def test_fault_14_a_counting_processor_is_called_as_in_plain_decoding(sampling: dict[str, Any], drafter: str) -> None:
    model = model_of(named("llama"))
    for prompt in PROMPTS:
        plain, drafted = Recorder(), Recorder()
        want = specdec.generate(
            model, one(prompt), max_new_tokens=NUM_NEW, logits_processor=LogitsProcessorList([plain]), **sampling
        )
        got = specdec.generate(
            model, one(prompt), max_new_tokens=NUM_NEW, logits_processor=[drafted], **sampling, **drafting(drafter)
        )
        assert torch.equal(got, want)
        text = want[0].tolist()
        assert plain.prefixes == drafted.prefixes == [tuple(text[:n]) for n in range(len(prompt), len(text))]
        if not sampling["do_sample"]:
            theirs = Recorder()
            assert (
                reference(model, prompt, NUM_NEW, logits_processor=LogitsProcessorList([theirs])) == text[len(prompt) :]
            )
            assert theirs.prefixes == plain.prefixes


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_14_the_llm_door_takes_processors(drafter: str) -> None:
    llm = specdec.LLM(model_of(named("llama")), **drafting(drafter))
    recorder = Recorder()
    text = llm.generate(PROMPTS[1], max_new_tokens=NUM_NEW, logits_processor=[recorder])[0]
    whole = text.prompt_token_ids + text.token_ids
    assert recorder.prefixes == [tuple(whole[:n]) for n in range(7, len(whole))]


class InPlace(LogitsProcessor):
    """Writes into what it is given, as some processors do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 20:] = -torch.inf
        return scores


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_14_a_processor_may_write_in_place(drafter: str) -> None:
    model = model_of(named("llama"))
    want = reference(model, PROMPTS[1], NUM_NEW, logits_processor=LogitsProcessorList([InPlace()]))
    got = specdec.generate(
        model, one(PROMPTS[1]), max_new_tokens=NUM_NEW, logits_processor=[InPlace()], **drafting(drafter)
    )
    assert got[0, 7:].tolist() == want
    assert max(want) < 20


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_15_a_grammar_per_row(drafter: str) -> None:
    """The function learns which row it is asked about, padding included, and only about what was emitted."""
    model = model_of(named("llama"))
    ids, mask = padded(PROMPTS)
    width = ids.shape[1]
    allowed = {0: [3, 4, 5], 1: [10, 11, 12, 13], 2: [40, 41]}
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def grammar(row: int, tokens: Tensor) -> list[int]:
        assert tokens.tolist()[:width] == ids[row].tolist()
        seen[row].append(len(tokens))
        new = tokens.tolist()[width:]
        return [t for t in allowed[row] if not new or t != new[-1]]

    got = specdec.generate(
        model, ids, mask, max_new_tokens=8, do_sample=False, prefix_allowed_tokens_fn=grammar, **drafting(drafter)
    )
    for i, row in enumerate(got[:, ids.shape[1] :].tolist()):
        assert set(row) <= set(allowed[i])
        assert all(a != b for a, b in itertools.pairwise(row))
        assert seen[i] == list(range(width, width + 8))


def test_fault_15_a_grammar_without_an_answer_is_an_error() -> None:
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, -torch.inf)

    for sampling in ({"do_sample": False}, {"do_sample": True}):
        with pytest.raises(ModelOutputError, match="-inf for every token"):
            specdec.generate(
                model_of(named("llama")), one(PROMPTS[0]), max_new_tokens=3, logits_processor=[Nothing()], **sampling
            )
