"""Fault 22: nothing of the caller's changes, whether a call succeeds or fails, and no call knows of another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import specdec
from specdec.errors import ConfigError, IncompatibleDrafterError, InputError
from tests.decoding import one, padded, prompts, reference
from tests.models.architectures import build, model_of, named

PROMPTS = prompts(3, 7)
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {},
    "oracle": {"width": 2},
    "random": {"branching": [2, 2]},
    "draft_model": {},
    "self_int8": {},
}


def state(model: Any) -> dict[str, Any]:
    """Return everything about a model that a caller could notice."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = dict(model.named_modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return {
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "attention": [m.config._attn_implementation for m in modules.values() if hasattr(m, "config")],
        "classes": {name: type(m) for name, m in modules.items()},
        "modules": {name: id(m) for name, m in modules.items()},
        "training": {name: m.training for name, m in modules.items()},
        "hooks": {name: [len(getattr(m, h)) for h in hooks] for name, m in modules.items()},
        "attributes": {name: sorted(vars(m)) for name, m in modules.items()},
        "tensors": {name: (id(t), t.data_ptr(), t._version, t.requires_grad) for name, t in tensors.items()},
        "sums": {name: float(t.detach().double().sum()) for name, t in tensors.items()},
    }  # fmt: skip


class Failing(LogitsProcessor):
    """Raises at its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("a processor of the caller's failed")
        return scores


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_fault_22_the_model_is_not_touched(name: str, drafter: str) -> None:
    model, draft = build(named(name)), build(named("llama"), seed=1)
    model.generation_config.temperature, model.generation_config.eos_token_id = 0.7, [5, 6]
    model.train()
    model.lm_head.weight.requires_grad_(True)
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    options = {"model": draft} if drafter == "draft_model" else DRAFTERS[drafter]
    before, draft_before = state(model), state(draft)
    ids, mask = padded(PROMPTS)
    call = {"max_new_tokens": 6, "drafter": drafter, "drafter_options": options}
    specdec.generate(model, ids, mask, do_sample=True, **call)
    assert state(model) == before
    with pytest.raises(RuntimeError, match="of the caller's failed"):
        specdec.generate(model, ids, mask, logits_processor=LogitsProcessorList([Failing()]), **call)
    assert state(model) == before
    with pytest.raises(ConfigError):
        specdec.generate(model, ids, mask, num_beams=4, **call)
    with pytest.raises(InputError):
        specdec.generate(model, ids, torch.zeros_like(mask), **call)
    specdec.LLM(model, drafter=drafter, drafter_options=options).generate(PROMPTS, max_new_tokens=6)
    assert state(model) == before
    assert state(draft) == draft_before
    handle.remove()
    model.eval()
    model.generation_config.eos_token_id = None
    assert reference(model, PROMPTS[0], 4) == reference(build(named(name)), PROMPTS[0], 4)


def test_fault_22_training_mode_does_not_reach_generation() -> None:
    """Dropout is off, although the caller's model is in training mode."""
    model = build(named("gpt2"), resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    want = reference(model, PROMPTS[1], 10)
    model.train()
    assert specdec.generate(model, one(PROMPTS[1]), max_new_tokens=10)[0, 7:].tolist() == want
    assert model.training


def test_fault_22_arguments_are_not_touched() -> None:
    model = model_of(named("llama"))
    ids, mask = padded(PROMPTS)
    config = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.8, top_k=7, pad_token_id=0)
    processors = LogitsProcessorList([])
    options = {"accept_rate": 0.5}
    kept = copy.deepcopy((ids, mask, config.to_dict(), options))
    specdec.generate(
        model, ids, mask, generation_config=config, logits_processor=processors, repetition_penalty=1.5,
        drafter="oracle", drafter_options=options,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="of the caller's failed"):
        specdec.generate(model, ids, mask, generation_config=config, logits_processor=[Failing()])
    assert torch.equal(ids, kept[0])
    assert torch.equal(mask, kept[1])
    assert (config.to_dict(), options) == kept[2:]
    assert len(processors) == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_22_two_calls_are_the_same(drafter: str) -> None:
    model = build(named("llama"))
    options = {"model": model_of(named("qwen2"))} if drafter == "draft_model" else DRAFTERS[drafter]
    llm = specdec.LLM(model, drafter=drafter, drafter_options=options)

    def trace(**sampling: Any) -> list[Any]:
        done = llm.generate(PROMPTS, max_new_tokens=15, **sampling)
        counters = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "drafted_at", "accepted_at")
        return [(c.token_ids, [getattr(c.stats, name) for name in counters]) for c in done]

    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        first = trace(**sampling)
        llm.generate(prompts(9, seed=8), max_new_tokens=7, temperature=1.0)
        assert trace(**sampling) == first
    llm.engine.target.cache.check_integrity()
    assert not llm.engine.target.cache._sequences


def test_fault_22_a_call_that_failed_leaves_no_trace() -> None:
    model = build(named("llama"))
    llm = specdec.LLM(model, drafter="ngram")
    first = [c.token_ids for c in llm.generate(PROMPTS, max_new_tokens=8)]
    with pytest.raises(RuntimeError, match="of the caller's failed"):
        llm.generate(PROMPTS, max_new_tokens=8, logits_processor=[Failing()])
    assert not llm.engine.has_unfinished
    assert not llm.engine.target.cache._sequences
    assert [c.token_ids for c in llm.generate(PROMPTS, max_new_tokens=8)] == first


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_22_greedy_generation_draws_nothing_from_the_global_generator(drafter: str) -> None:
    model = build(named("llama"))
    options = {"model": model_of(named("qwen2"))} if drafter == "draft_model" else DRAFTERS[drafter]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    specdec.generate(model, one(PROMPTS[1]), max_new_tokens=8, drafter=drafter, drafter_options=options)
    assert torch.equal(torch.get_rng_state(), before)


def test_fault_22_changed_weights_are_seen() -> None:
    """A runner is kept per model, not per what the model once was."""
    model = build(named("llama"))
    before = specdec.generate(model, one(PROMPTS[1]), max_new_tokens=8)
    model.lm_head.weight.mul_(-1.0)
    after = specdec.generate(model, one(PROMPTS[1]), max_new_tokens=8)
    assert after[0, 7:].tolist() == reference(model, PROMPTS[1], 8)
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight, requires_grad=False)
    assert torch.equal(specdec.generate(model, one(PROMPTS[1]), max_new_tokens=8), before)


def test_fault_22_a_refused_drafter_changes_nothing() -> None:
    model = build(named("mixtral"))
    before = state(model)
    with pytest.raises(IncompatibleDrafterError):
        specdec.generate(model, one(PROMPTS[0]), max_new_tokens=2, drafter="self_int8")
    assert state(model) == before
