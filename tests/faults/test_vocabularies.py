"""Fault 20: a draft model must mean the same tokens by the same ids; padding ids of a head are nobody's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec
from specdec.errors import IncompatibleDrafterError
from specdec.interfaces import SamplingParams
from tests.decoding import add, engine_of, one, prompts, reference
from tests.models.architectures import build, model_of, named

PROMPT = prompts(6)[0]


class Words:
    """As much of a tokenizer as comparing vocabularies takes."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


WORDS = [f"w{i}" for i in range(60)]


def draft_with(target_words: Any, draft_words: Any, draft_size: int = 64) -> torch.Tensor:
    target, draft = model_of(named("llama")), build(named("llama"), seed=1, vocab_size=draft_size)
    return specdec.generate(
        target, one(PROMPT), max_new_tokens=12, do_sample=False, drafter="draft_model", tokenizer=target_words,
        drafter_options={"model": draft, "tokenizer": draft_words},
    )  # fmt: skip


@pytest.mark.parametrize("index", [0, 17, 59])
def test_fault_20_the_first_differing_token_is_named(index: int) -> None:
    other = list(WORDS)
    other[index] = "odd"
    if index < 59:
        other[-1] = "odder"
    with pytest.raises(IncompatibleDrafterError, match=f"token id {index} is 'odd' .*'w{index}' for the target"):
        draft_with(Words(WORDS), Words(other))


def test_fault_20_a_longer_vocabulary_differs_where_the_shorter_ends() -> None:
    with pytest.raises(IncompatibleDrafterError, match=r"token id 58 is None .*'w58' for the target"):
        draft_with(Words(WORDS), Words(WORDS[:58]))


@pytest.mark.parametrize("draft_size", [60, 64, 72])
def test_fault_20_padded_heads_are_fine(draft_size: int) -> None:
    got = draft_with(Words(WORDS), Words(WORDS), draft_size)
    assert got[0, len(PROMPT) :].tolist() == reference(model_of(named("llama")), PROMPT, 12)


@pytest.mark.parametrize("draft_size", [60, 72])
@pytest.mark.parametrize("known", [(None, None), (Words(WORDS), None), (None, Words(WORDS))], ids=["none", "a", "b"])
def test_fault_20_without_tokenizers_sizes_must_agree(known: tuple[Any, Any], draft_size: int) -> None:
    with pytest.raises(IncompatibleDrafterError, match=f"has {draft_size} token ids and the target 64"):
        draft_with(*known, draft_size)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("draft_size", [60, 72])
def test_fault_20_padding_ids_are_never_drawn(draft_size: int, verifier: str) -> None:
    """A wider head that is sure of a padding id, and a narrower one that lacks the target's last ids."""
    target, draft = model_of(named("llama")), build(named("llama"), seed=1, vocab_size=draft_size)
    if draft_size == 72:
        draft.lm_head.weight[64:] *= 50.0
    same = {"model": draft, "tokenizer": Words(WORDS)}
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=1)):
        llm = specdec.LLM(
            target, tokenizer=Words(WORDS), drafter="draft_model", drafter_options=same, verifier=verifier
        )
        request = add(llm.engine, PROMPT, 40, sampling=sampling)
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert request.stats.num_rejected_drafts == 0
        assert request.stats.num_draft_tokens > 0
        assert max(request.tokens) < 64
        if sampling.greedy or verifier == "match":
            plain = engine_of(target)
            alone = add(plain, PROMPT, 40, sampling=sampling)
            while plain.has_unfinished:
                plain.step()
            assert alone.tokens == request.tokens
