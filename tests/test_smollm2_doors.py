"""An existing program on the real model: a padded batch, processors, stop strings and a streamer, through each door.

float32: a row may part from transformers' at a near-tie, as docs/design.md says; none did on the machines seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TextIteratorStreamer,
)

import specdec
from specdec.debug.near_tie import NEAR_TIES

pytestmark = pytest.mark.slow

TEXTS = [
    "List the first five prime numbers and explain each.",
    "Write a haiku about the sea.",
    "What is the capital of France? Answer in one short sentence.",
    "Give me three tips for a better night's sleep, as a numbered list.",
]
STOPS = ["\n\n", "."]
OPTIONS: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.1}


class NoDigits(LogitsProcessor):
    """A rule of the program's own: makes every token with a digit unlikely."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids = torch.tensor([i for t, i in tokenizer.get_vocab().items() if any(c.isdigit() for c in t)])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.ids] -= 3.0
        return scores


@pytest.fixture(scope="module")
def batch(smollm2: tuple[Any, Any]) -> dict[str, Any]:
    _, tokenizer = smollm2
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, tokenize=False)
        for t in TEXTS
    ]
    return dict(tokenizer(chats, return_tensors="pt", padding=True, padding_side="left"))


@pytest.fixture(scope="module", params=[STOPS[:1], STOPS], ids=["paragraph", "sentence"])
def case(request: pytest.FixtureRequest, smollm2: tuple[Any, Any], batch: dict[str, Any]) -> tuple[list[str], Any]:
    """Return stop strings and transformers' own answer."""
    model, tokenizer = smollm2
    processors = [NoDigits(tokenizer)]
    want = model.generate(
        **batch, **OPTIONS, logits_processor=processors, stop_strings=request.param, tokenizer=tokenizer
    )
    return request.param, want


def assert_same(model: Any, tokenizer: Any, batch: dict[str, Any], got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert equal ids; one row may part where the two best scores nearly tie."""
    width = batch["input_ids"].shape[1]
    shorter = min(got.shape[1], want.shape[1])
    parted = [i for i in range(len(want)) if not torch.equal(got[i, :shorter], want[i, :shorter])]
    for i in parted:
        at = int((got[i, :shorter] != want[i, :shorter]).nonzero()[0, 0])
        ids = want[i : i + 1, width - int(batch["attention_mask"][i].sum()) : at]
        with torch.no_grad():
            scores = model(input_ids=ids).logits[:, -1].float()
        scores = NoDigits(tokenizer)(ids, RepetitionPenaltyLogitsProcessor(OPTIONS["repetition_penalty"])(ids, scores))
        first, second = scores[0].topk(2).values.tolist()
        assert first - second < NEAR_TIES[torch.float32], (i, at, first - second)
    assert len(parted) <= 1
    assert parted or torch.equal(got, want)


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix", "self_int8"])
def test_the_three_doors(
    drafter: str, smollm2: tuple[Any, Any], batch: dict[str, Any], case: tuple[list[str], Any]
) -> None:
    model, tokenizer = smollm2
    stops, want = case
    width = batch["input_ids"].shape[1]
    own: dict[str, Any] = {"logits_processor": [NoDigits(tokenizer)]}
    got = specdec.generate(model, **batch, **OPTIONS, **own, stop_strings=stops, tokenizer=tokenizer, drafter=drafter)
    assert_same(model, tokenizer, batch, got, want)
    inside = model.generate(
        **batch,
        **OPTIONS,
        **own,
        stopping_criteria=[StopStringCriteria(tokenizer, stops)],
        custom_generate=specdec.custom_generate,
        drafter=drafter,
        spec_tokenizer=tokenizer,
    )
    assert_same(model, tokenizer, batch, inside, want)
    model.generation_config.repetition_penalty = OPTIONS["repetition_penalty"]
    try:
        llm = specdec.LLM(model, tokenizer=tokenizer, drafter=drafter)
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*batch.values(), strict=True)]
        pieces = list(llm.stream(prompts, max_new_tokens=48, stop=stops, **own))
    finally:
        model.generation_config.repetition_penalty = None
    for i, row in enumerate(want[:, width:].tolist()):
        done = next(p.completion for p in pieces if p.index == i and p.completion is not None)
        ids = torch.tensor([*prompts[i], *done.token_ids])[None]
        whole = torch.tensor([*prompts[i], *row[: len(done.token_ids)]])[None]
        mine = {"input_ids": torch.tensor([prompts[i]]), "attention_mask": torch.ones(1, len(prompts[i]))}
        assert_same(model, tokenizer, mine, ids, whole)
        if torch.equal(ids, whole):
            assert all(token == model.generation_config.pad_token_id for token in row[len(done.token_ids) :])
        assert "".join(p.text for p in pieces if p.index == i) == done.text
        assert not any(stop in done.text for stop in stops)


def test_a_streamer_says_the_text(smollm2: tuple[Any, Any], batch: dict[str, Any]) -> None:
    model, tokenizer = smollm2
    ids = batch["input_ids"][2:3][:, batch["attention_mask"][2].bool()]
    texts = []
    for generate in (
        model.generate,
        lambda i, **o: specdec.generate(model, i, drafter="self_int8", tokenizer=tokenizer, **o),
    ):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        generate(ids, max_new_tokens=24, do_sample=False, streamer=streamer)
        texts.append("".join(streamer))
    assert texts[0] == texts[1] != ""
