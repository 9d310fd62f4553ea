"""Faults 6 and 7: rows of a batch do not know each other, and padding does not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec
from tests.decoding import add, assert_fresh_kv, engine_of, one, padded, prompts, reference
from tests.models.architectures import build, model_of, named

LENGTHS = (3, 7, 12)
PROMPTS = prompts(*LENGTHS)
DRAFTERS: dict[str, dict[str, Any]] = {"none": {}, "oracle": {"accept_rate": 0.7, "width": 2}, "ngram": {}}


@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_fault_06_ragged_rows(name: str, width: int, chunk: int) -> None:
    """Acceptance rotates 0, 2, all; requests join one step apart and end at different steps."""
    model = model_of(named(name))
    script = {"accept_counts": [0, 2, 4], "width": width}
    engine = engine_of(model, "scripted", script, max_draft_tokens=4 * width, prefill_chunk_tokens=chunk)
    waiting = list(zip(PROMPTS, (17, 10, 13), strict=True))
    requests = []
    accepted_together = set()
    while waiting or engine.has_unfinished:
        if waiting:
            prompt, most = waiting.pop(0)
            requests.append(add(engine, prompt, most))
        outputs = engine.step()
        accepted_together.add(tuple(o.num_accepted for o in outputs if not o.finish_reason))
        engine.target.cache.check_integrity()
        for request in requests:
            if request.finish_reason is None and engine.target.cache.is_open(request.request_id):
                assert_fresh_kv(engine.target, request.request_id, request.tokens)
    assert any(len(set(counts)) > 1 for counts in accepted_together), "no step was ragged"
    for request, prompt, most in zip(requests, PROMPTS, (17, 10, 13), strict=True):
        assert request.new_tokens == reference(model, prompt, most)
        alone = engine_of(model, "scripted", script, max_draft_tokens=4 * width)
        single = add(alone, prompt, most)
        while alone.has_unfinished:
            alone.step()
        assert request.new_tokens == single.new_tokens
        assert request.stats.num_steps == single.stats.num_steps
        assert request.stats.accepted_at == single.stats.accepted_at


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("extra", [0, 5])
def test_fault_07_padding(extra: int, left: bool, drafter: str) -> None:
    model = model_of(named("qwen2_window"))
    ids, mask = padded(PROMPTS, left=left, extra=extra)
    out = specdec.generate(
        model, ids, mask, max_new_tokens=12, do_sample=False, drafter=drafter, drafter_options=DRAFTERS[drafter]
    )
    assert torch.equal(out[:, : ids.shape[1]], ids)
    assert out[:, ids.shape[1] :].tolist() == [reference(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_fault_07_every_dtype_of_mask(dtype: torch.dtype) -> None:
    model = model_of(named("llama"))
    ids, mask = padded(PROMPTS)
    out = specdec.generate(model, ids, mask.to(dtype), max_new_tokens=4, do_sample=False)
    assert out[:, 12:].tolist() == [reference(model, prompt, 4) for prompt in PROMPTS]


def test_fault_07_a_mask_is_inferred_as_transformers_infers_it() -> None:
    model = model_of(named("llama"))
    ids, mask = padded(PROMPTS)
    without, given = (specdec.generate(model, ids, m, max_new_tokens=8, do_sample=False) for m in (None, mask))
    assert torch.equal(without, given)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_07_pad_is_eos(drafter: str) -> None:
    """The padding id inside a prompt is a token like any other when a mask says so, and when none is given."""
    model = build(named("llama"))
    eos = reference(model, PROMPTS[1], 12)[7]
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = eos
    rows = [[eos, *PROMPTS[0]], [*PROMPTS[1][:3], eos, eos, *PROMPTS[1][3:]]]
    options: dict[str, Any] = {"drafter": drafter, "drafter_options": DRAFTERS[drafter]}
    expected = []
    for row in rows:
        want = reference(model, row, 12)
        expected.append(want)
        for mask in (None, torch.ones(1, len(row))):
            got = specdec.generate(model, one(row), mask, max_new_tokens=12, do_sample=False, **options)
            assert got[0, len(row) :].tolist() == want
    ids, mask = padded(rows, pad=eos)
    got = specdec.generate(model, ids, mask, max_new_tokens=12, do_sample=False, **options)
    longest = max(map(len, expected))
    assert got[:, ids.shape[1] :].tolist() == [want + [eos] * (longest - len(want)) for want in expected]


def test_fault_07_a_batch_like_transformers() -> None:
    """Left padding, different ends, padding after them: the whole tensor is the same."""
    model = build(named("mistral"))
    answers = [reference(model, prompt, 12) for prompt in PROMPTS]
    model.generation_config.eos_token_id = [answers[0][3], answers[1][8]]
    ids, mask = padded(PROMPTS)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for drafter, options in DRAFTERS.items():
        got = specdec.generate(
            model, ids, mask, max_new_tokens=12, do_sample=False, drafter=drafter, drafter_options=options
        )
        assert torch.equal(got, want)
