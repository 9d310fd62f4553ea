"""Faults 10, 12 and 13: EOS, length and context limits in the middle of an accepted block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec
from specdec.errors import ConfigError, InputError
from specdec.models.runner import ModelRunner
from tests.decoding import add, assert_fresh_kv, drain, engine_of, one, padded, prompts, reference
from tests.models.architectures import build, model_of, named

PROMPT = prompts(6, seed=3)[0]
NUM_NEW = 18
K = 4
LIMIT = 24
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "oracle": ("oracle", {}),
    "tree": ("oracle", {"width": 2}),
    "scripted": ("scripted", {"accept_counts": [3, 0, 1, 4]}),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_10_every_emitted_token_as_eos(drafter: str) -> None:
    """First, middle and last of a block, and the next token after it."""
    model = model_of(named("llama"))
    answer = reference(model, PROMPT, NUM_NEW)
    assert len(set(answer)) > 6
    name, options = DRAFTERS[drafter]
    places = set()
    for eos in set(answer):
        engine = engine_of(model, name, options, max_draft_tokens=K)
        request = add(engine, PROMPT, NUM_NEW, eos_token_ids=frozenset({eos}))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
            assert request.finish_reason or assert_fresh_kv(engine.target, request.request_id, request.tokens) is None
        stop = answer.index(eos) + 1
        assert request.new_tokens == answer[:stop]
        assert [t for o in outputs for t in o.token_ids] == answer[:stop]
        assert request.finish_reason == outputs[-1].finish_reason == "stop"
        assert not engine.target.cache.is_open(request.request_id)
        request.stats.check()
        places.add((len(outputs[-1].token_ids), outputs[-1].num_accepted))
    if drafter == "oracle":
        assert {(n, n) for n in range(1, K + 1)} & places, "no EOS was a draft token"
        assert any(n == a + 1 for n, a in places), "no EOS was a next token"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_10_the_door_and_the_batch(drafter: str) -> None:
    model = build(named("llama"))
    rows = prompts(3, 7, 12)
    answers = [reference(model, row, NUM_NEW) for row in rows]
    ids, mask = padded(rows)
    name, options = DRAFTERS[drafter]
    for i in range(0, NUM_NEW, 3):
        eos = [answers[0][i], answers[1][-1 - i]]
        want = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=eos)
        got = specdec.generate(
            model, ids, mask, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=eos, drafter=name,
            drafter_options=options,
        )  # fmt: skip
        assert torch.equal(got, want)
        model.generation_config.eos_token_id = eos
        llm = specdec.LLM(model, drafter=name, drafter_options=options)
        for completion, row in zip(llm.generate(rows, max_new_tokens=NUM_NEW), answers, strict=True):
            cut = min((row.index(e) for e in eos if e in row), default=NUM_NEW) + 1
            assert completion.token_ids == row[:cut]
            assert completion.finish_reason == ("stop" if cut <= NUM_NEW else "length")
        free = llm.generate(rows, max_new_tokens=NUM_NEW, ignore_eos=True)
        assert [c.token_ids for c in free] == answers
        model.generation_config.eos_token_id = None


def test_fault_10_processors_never_see_what_lies_behind_an_eos() -> None:
    """A grammar has nothing to say after its end, although drafts go on there."""
    model = model_of(named("llama"))
    answer = reference(model, PROMPT, NUM_NEW)
    eos = answer[6]
    stop = answer.index(eos) + 1

    def grammar(batch_id: int, ids: torch.Tensor) -> list[int]:
        position = len(ids) - len(PROMPT)
        assert eos not in answer[:position], "asked behind the end"
        return [answer[position]]

    for name, options in DRAFTERS.values():
        got = specdec.generate(
            model, one(PROMPT), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=eos, drafter=name,
            drafter_options=options, max_draft_tokens=8, prefix_allowed_tokens_fn=grammar,
        )  # fmt: skip
        assert got[0, len(PROMPT) :].tolist() == answer[:stop]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, K, K + 1, K + 2])
def test_fault_12_max_new_tokens(max_new_tokens: int, drafter: str) -> None:
    model = model_of(named("llama"))
    name, options = DRAFTERS[drafter]
    engine = engine_of(model, name, options, max_draft_tokens=K)
    request = add(engine, PROMPT, max_new_tokens)
    drain(engine)
    assert request.new_tokens == reference(model, PROMPT, NUM_NEW)[:max_new_tokens]
    assert request.finish_reason == "length"
    request.stats.check()
    llm = specdec.LLM(model, drafter=name, drafter_options=options, max_draft_tokens=K)
    assert llm.generate(PROMPT, max_new_tokens=max_new_tokens)[0].token_ids == request.new_tokens
    ids = one(PROMPT)
    if max_new_tokens:
        got = specdec.generate(model, ids, max_new_tokens=max_new_tokens, drafter=name, drafter_options=options)
        assert got[0].tolist() == request.tokens
    else:  # as transformers does
        with pytest.raises(ConfigError, match="max_new_tokens"):
            specdec.generate(model, ids, max_new_tokens=max_new_tokens, drafter=name, drafter_options=options)


class TestFault12ContextLimit:
    """A model of 24 positions: never past it, whatever is drafted; at it nothing can be generated."""

    @pytest.mark.parametrize("short", [1, 2, K, K + 1, K + 2])
    @pytest.mark.parametrize(
        ("name", "drafter"),
        [*((name, d) for name in ("llama", "gpt2") for d in (*DRAFTERS, "draft_model")), ("llama", "self_int8")],
    )
    def test_fault_12_near_the_limit(
        self, name: str, short: int, drafter: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limit = {"n_positions": LIMIT} if name == "gpt2" else {"max_position_embeddings": LIMIT}
        model = build(named(name), **limit)
        prompt = prompts(LIMIT - short, seed=short)[0]
        positions: list[int] = []
        forward = ModelRunner.forward

        def watched(self: Any, segments: Any, *args: Any) -> Any:
            for s in segments:
                positions.append(self.cache.context_len(s.request_id) + len(s.token_ids))
            return forward(self, segments, *args)

        monkeypatch.setattr(ModelRunner, "forward", watched)
        kind, options = DRAFTERS.get(drafter, (drafter, {"model": model} if drafter == "draft_model" else {}))
        want = reference(model, prompt, short)
        for max_new_tokens in (short, short + 1, 50):
            got = specdec.generate(
                model, one(prompt), max_new_tokens=max_new_tokens, drafter=kind, drafter_options=options,
                max_draft_tokens=K,
            )  # fmt: skip
            assert got[0, len(prompt) :].tolist() == want
        assert max(positions) <= LIMIT

    @pytest.mark.parametrize("over", [0, 1, 10])
    def test_fault_12_at_or_over_the_limit(self, over: int) -> None:
        model = build(named("llama"), max_position_embeddings=LIMIT)
        rows = [PROMPT, prompts(LIMIT + over)[0]]
        engine = engine_of(model)
        with pytest.raises(InputError, match=rf"has {LIMIT + over} tokens and the context limit is {LIMIT}"):
            specdec.LLM(model).generate(rows, max_new_tokens=1)
        with pytest.raises(InputError, match=f"{LIMIT}"):
            specdec.generate(model, *padded(rows), max_new_tokens=1)
        assert not engine.target.cache._sequences
        assert not engine.has_unfinished

    def test_fault_12_max_length_counts_the_prompt(self) -> None:
        model = model_of(named("llama"))
        rows = prompts(3, 7, 12)
        ids, mask = padded(rows)
        want = model.generate(ids, attention_mask=mask, max_length=20, do_sample=False)
        got = specdec.generate(model, ids, mask, max_length=20, do_sample=False, drafter="oracle")
        assert torch.equal(got, want)


class TestFault13ShortDraftContext:
    """The draft model ends at 16 positions, the target at 256."""

    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    @pytest.mark.parametrize("length", [3, 11, 12, 15, 16, 17, 40])
    def test_fault_13_goes_on_without_drafts(self, length: int, name: str) -> None:
        limit = {"n_positions": 16} if name == "gpt2" else {"max_position_embeddings": 16}
        target, draft = model_of(named("llama")), build(named(name), **limit)
        prompt = prompts(length)[0]
        engine = engine_of(target, "draft_model", {"model": draft}, max_draft_tokens=K)
        request = add(engine, prompt, 20)
        beside = add(engine, prompts(3)[0], 12)
        while engine.has_unfinished:
            before = len(request.tokens)
            drafted = request.stats.num_draft_tokens
            engine.step()
            if before >= 17 or before <= length:
                assert request.stats.num_draft_tokens == drafted
            elif before < 16 and request.finish_reason is None:
                assert request.stats.num_draft_tokens > drafted
        assert request.new_tokens == reference(target, prompt, 20)
        assert beside.new_tokens == reference(target, prompts(3)[0], 12)
