"""Fault 16: log-probabilities that differ, are missing or belong to rejected tokens. And scores and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specdec
from specdec.errors import ConfigError
from tests.decoding import one, padded, prompts
from tests.models.architectures import build, named

PROMPTS = prompts(3, 7, 12)
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "oracle": {"accept_rate": 0.6},
    "adversary": {"width": 2},
    "random": {"branching": [3, 2]},
}
each_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
WARPED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}


def llama(eos: int | None = None) -> Any:
    model = build(named("llama"))
    model.generation_config.eos_token_id = eos
    return model


def plain_logits(model: Any, tokens: list[int], num_new: int) -> Tensor:
    """Return [num_new, V], what a forward over everything says before each new token."""
    with torch.no_grad():
        return model(input_ids=one(tokens)).logits[0, -num_new - 1 : -1].float()


@each_drafter
@pytest.mark.parametrize("sampled", [False, True])
def test_every_emitted_token(drafter: str, sampled: bool) -> None:
    model = llama()
    llm = specdec.LLM(model, drafter=drafter, drafter_options=DRAFTERS[drafter], max_draft_tokens=6)
    options = {**WARPED, "seed": 1} if sampled else {}
    for done in llm.generate(PROMPTS, max_new_tokens=15, logprobs=3, **options):
        assert done.logprobs is not None
        assert [r.token_id for r in done.logprobs] == done.token_ids
        raw = plain_logits(model, [*done.prompt_token_ids, *done.token_ids], 15).log_softmax(-1)
        top = raw.topk(3, dim=-1)
        for i, record in enumerate(done.logprobs):
            assert record.raw_logprob == pytest.approx(float(raw[i, record.token_id]), abs=1e-4)
            assert [t for t, _ in record.top] == top.indices[i].tolist()
            assert [p for _, p in record.top] == pytest.approx(top.values[i].tolist(), abs=1e-4)
            assert record.logprob is not None
            assert record.logprob <= 0.0
            if not sampled:
                assert record.logprob == pytest.approx(record.raw_logprob, abs=1e-6)


@each_drafter
@pytest.mark.parametrize("door", ["generate", "custom_generate"])
def test_greedy_scores_and_logits_are_transformers(drafter: str, door: str) -> None:
    model = llama(eos=9)
    ids, mask = padded(PROMPTS)
    options = {
        "max_new_tokens": 14,
        "do_sample": False,
        "repetition_penalty": 1.4,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    want = model.generate(ids, attention_mask=mask, **options)
    own = {"drafter": drafter, "drafter_options": DRAFTERS[drafter], "output_logprobs": True}
    if door == "generate":
        got = specdec.generate(model, ids, mask, **options, **own)
    else:
        got = model.generate(ids, attention_mask=mask, custom_generate=specdec.custom_generate, **options, **own)
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.scores) == len(got.logits) == len(want.scores)
    new = want.sequences[:, ids.shape[1] :]
    for row in range(3):
        ends = (new[row] == 9).nonzero()
        length = int(ends[0, 0]) + 1 if len(ends) else new.shape[1]
        for name in ("scores", "logits"):
            ours, theirs = (torch.stack([s[row] for s in getattr(o, name)]) for o in (got, want))
            torch.testing.assert_close(ours[:length], theirs[:length], rtol=1e-4, atol=1e-4)
            assert not bool(ours[length:].any()), "zeros behind the end, as documented"
        chosen = torch.arange(length), new[row, :length]
        theirs = torch.stack([s[row] for s in want.scores])[:length].log_softmax(-1)[chosen]
        torch.testing.assert_close(got.logprobs[row, :length], theirs, rtol=1e-4, atol=1e-4)
        raw = torch.stack([s[row] for s in want.logits])[:length].log_softmax(-1)[chosen]
        torch.testing.assert_close(got.raw_logprobs[row, :length], raw, rtol=1e-4, atol=1e-4)
    assert got.finish_reasons == tuple("stop" if 9 in row else "length" for row in new.tolist())
    assert got.past_key_values is got.attentions is got.hidden_states is None


def test_sampled_scores_are_warped_as_transformers_warps() -> None:
    model = llama()
    options = {"max_new_tokens": 6, "do_sample": True, "return_dict_in_generate": True, "output_scores": True, **WARPED}
    got = specdec.generate(model, one(PROMPTS[2]), seed=2, output_logits=True, **options)
    new = got.sequences[0, 12:].tolist()
    processors = model._get_logits_processor(
        generation_config=model._prepare_generation_config(None, do_sample=True, **WARPED)[0], input_ids_seq_length=12
    )
    for i, (score, logit) in enumerate(zip(got.scores, got.logits, strict=True)):
        ids = one([*PROMPTS[2], *new[:i]])
        torch.testing.assert_close(score, processors(ids, logit.clone()), rtol=1e-5, atol=1e-5)
        assert score[0, new[i]] > -torch.inf


@each_drafter
def test_transition_scores_work(drafter: str) -> None:
    """transformers' own helper on our output."""
    model = llama()
    got = specdec.generate(
        model,
        one(PROMPTS[1]),
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logprobs=True,
        drafter=drafter,
        drafter_options=DRAFTERS[drafter],
    )
    scores = model.compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
    torch.testing.assert_close(scores, got.logprobs, rtol=1e-5, atol=1e-5)


def test_only_what_was_asked_for() -> None:
    model = llama()
    plain = specdec.generate(model, one(PROMPTS[0]), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert plain.scores is plain.logits is plain.logprobs is None
    assert plain.stats[0].num_steps == 2
    ids, stats = specdec.generate(model, one(PROMPTS[0]), max_new_tokens=3, do_sample=False, return_stats=True)
    assert torch.equal(ids, plain.sequences)
    assert stats[0].num_steps == 2
    assert specdec.LLM(model).generate(PROMPTS[0], max_new_tokens=3)[0].logprobs is None


def test_bad_values() -> None:
    with pytest.raises(ConfigError, match="logprobs=-1; allowed"):
        specdec.LLM(llama()).generate(PROMPTS[0], logprobs=-1)
    with pytest.raises(ConfigError, match="output_logprobs=True needs return_dict_in_generate"):
        specdec.generate(llama(), one(PROMPTS[0]), output_logprobs=True, max_new_tokens=2)


def test_a_failed_step_keeps_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = specdec.LLM(llama(), drafter="oracle")
    want = llm.generate(PROMPTS[0], max_new_tokens=12, logprobs=0)[0]
    observe, failures = llm.engine.drafting.observe, [0]

    def failing(*args: Any) -> None:
        failures[0] += 1
        if failures[0] == 2:
            raise RuntimeError("once")
        observe(*args)

    monkeypatch.setattr(llm.engine.drafting, "observe", failing)
    stream = llm._jobs(PROMPTS[0], llm._stream_options("x", {"max_new_tokens": 12, "logprobs": 0}))
    request = llm.engine.add_request(PROMPTS[0], stream[0].sampling, stream[0].stop, stream[0].keep)
    while request.finish_reason is None:
        try:
            llm.engine.step()
        except RuntimeError:
            assert len(request.records) == len(request.new_tokens) == len(request.from_draft)
    assert request.records == want.logprobs
    assert failures[0] > 2
