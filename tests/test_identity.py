"""Fault 1: whatever drafts, greedy output is transformers' own greedy output, token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import specdec
from specdec.errors import IncompatibleDrafterError, UnsupportedModelError
from specdec.models.build import RunnerConfig, build_runner, runner_for
from specdec.models.hosted import HostedProgram
from specdec.models.lean import LeanProgram
from tests.decoding import gap_at_divergence, one, padded, prompts, reference
from tests.models.architectures import REFUSED, SUPPORTED, Architecture, build, model_of, named

NUM_NEW = 16
PROMPTS = prompts(3, 7, 12)
Options = dict[str, Any]
# What drafts: a drafter's name and its options for a target model.
DRAFTERS: dict[str, tuple[str, Callable[[Any], Options]]] = {
    "none": ("none", lambda model: {}),
    "ngram": ("ngram", lambda model: {}),
    "oracle": ("oracle", lambda model: {}),
    "oracle_sometimes": ("oracle", lambda model: {"accept_rate": 0.6}),
    "oracle_tree": ("oracle", lambda model: {"accept_rate": 0.8, "width": 2}),
    "adversary": ("adversary", lambda model: {}),
    "random": ("random", lambda model: {}),
    "random_tree": ("random", lambda model: {"branching": [3, 2]}),
    "scripted": ("scripted", lambda model: {"accept_counts": [0, 2, 6]}),
    "draft_model": ("draft_model", lambda model: {"model": model_of(named("llama"))}),
    "draft_model_itself": ("draft_model", lambda model: {"model": model}),
    "self_int8": ("self_int8", lambda model: {}),
    "suffix": ("suffix", lambda model: {"offset": 2}),
    "suffix_tree": ("suffix", lambda model: {"offset": 4, "tree": True, "share": True, "min_token_prob": 0.0}),
    "token_recycling": ("token_recycling", lambda model: {}),
    "early_exit": ("early_exit", lambda model: {}),
    "early_exit_tree": ("early_exit", lambda model: {"tree": [2, 2]}),
}
# Too little of these is Linear layers (expert tensors, Conv1D, a table of positions), which the drafter says itself.
NOT_INT8 = {"gpt2", "opt", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4"}
NOT_INT8 |= {"falcon", "falcon_new_decoder", "falcon_mha"}  # Linear layers of a class of their own


@cache
def answers(architecture: Architecture) -> list[list[int]]:
    return [reference(model_of(architecture), prompt, NUM_NEW) for prompt in PROMPTS]


def run(model: Any, rows: list[list[int]], **options: Any) -> list[list[int]]:
    """Return the new tokens of a left-padded batch."""
    ids, mask = padded(rows)
    out = specdec.generate(model, ids, mask, max_new_tokens=NUM_NEW, do_sample=False, **options)
    assert torch.equal(out[:, : ids.shape[1]], ids)
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("architecture", SUPPORTED, ids=str)
def test_fault_01_greedy_identity(architecture: Architecture, drafter: str) -> None:
    model = model_of(architecture)
    name, options_for = DRAFTERS[drafter]
    options: Options = {"drafter": name, "drafter_options": options_for(model), "max_draft_tokens": 6}
    if drafter == "self_int8" and architecture.name in NOT_INT8:
        with pytest.raises(IncompatibleDrafterError, match="Linear layers"):
            run(model, PROMPTS[:1], **options)
        return
    if options["drafter_options"].get("tree") and not runner_for(model).supports_trees:
        with pytest.raises(IncompatibleDrafterError, match="chains only"):
            run(model, PROMPTS[:1], **options)
        return
    expected = answers(architecture)
    assert run(model, PROMPTS, **options) == expected
    assert run(model, PROMPTS[2:], prefill_chunk_tokens=5, **options) == expected[2:]


@pytest.mark.parametrize("architecture", SUPPORTED, ids=str)
def test_the_models_say_something(architecture: Architecture) -> None:
    """Identity of a constant would prove nothing."""
    said = answers(architecture)
    assert len({tuple(answer) for answer in said}) == len(PROMPTS)
    assert len({token for answer in said for token in answer}) >= 8, said


@pytest.mark.parametrize("architecture", SUPPORTED, ids=str)
def test_every_architecture_takes_trees(architecture: Architecture) -> None:
    """All but those whose trees do not conform."""
    assert runner_for(model_of(architecture)).supports_trees == architecture.trees


def test_the_window_matters() -> None:
    """The windowed models would not pass without their windows."""
    architecture = named("mistral_window")
    unbounded = build(architecture, sliding_window=None)
    assert reference(unbounded, PROMPTS[2], NUM_NEW) != answers(architecture)[2]


@pytest.mark.parametrize("drafter", ["oracle_sometimes", "oracle_tree", "adversary", "ngram", "draft_model"])
@pytest.mark.parametrize("max_draft_tokens", range(1, 9))
def test_fault_01_every_draft_length(max_draft_tokens: int, drafter: str) -> None:
    architecture = named("llama_mha_biases")
    name, options_for = DRAFTERS[drafter]
    options = options_for(model_of(architecture))
    got = run(model_of(architecture), PROMPTS, drafter=name, drafter_options=options, max_draft_tokens=max_draft_tokens)
    assert got == answers(architecture)


@pytest.mark.parametrize("drafter", ["oracle_tree", "draft_model", "self_int8", "none"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2_window", "qwen3", "mistral", "mistral_window"])
def test_fault_01_lean_and_hosted_programs(name: str, drafter: str) -> None:
    model = model_of(named(name))
    assert isinstance(runner_for(model).program, LeanProgram)
    assert isinstance(runner_for(model, RunnerConfig(lean=False)).program, HostedProgram)
    drafter_name, options_for = DRAFTERS[drafter]
    got = run(model, PROMPTS, drafter=drafter_name, drafter_options=options_for(model), lean=False)
    assert got == answers(named(name))


@pytest.mark.parametrize("drafter", ["none", "oracle_tree", "draft_model_itself", "self_int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lean", [True, False])
def test_fault_01_lower_precision(dtype: torch.dtype, drafter: str, lean: bool) -> None:
    """float32 is identical; half precision may differ only where the two best tokens nearly tie."""
    model = model_of(named("llama"), dtype)
    name, options_for = DRAFTERS[drafter]
    got = run(model, PROMPTS, drafter=name, drafter_options=options_for(model), lean=lean)
    for prompt, answer in zip(PROMPTS, got, strict=True):
        expected = reference(model, prompt, NUM_NEW)
        if dtype == torch.float32:
            assert answer == expected
        elif answer != expected:
            assert gap_at_divergence(model, prompt, expected, answer) < 0.02


@pytest.mark.parametrize("drafter", ["none", "oracle_tree", "draft_model", "self_int8"])
def test_fault_01_the_llm_door(drafter: str) -> None:
    model = model_of(named("llama"))
    name, options_for = DRAFTERS[drafter]
    llm = specdec.LLM(model, drafter=name, drafter_options=options_for(model), max_draft_tokens=5)
    for _ in range(2):
        completions = llm.generate(PROMPTS, max_new_tokens=NUM_NEW)
        assert [c.token_ids for c in completions] == answers(named("llama"))
        assert [c.prompt_token_ids for c in completions] == PROMPTS
        assert {c.finish_reason for c in completions} == {"length"}
        assert {c.text for c in completions} == {""}  # no tokenizer
    assert llm.generate(PROMPTS[0], max_new_tokens=3)[0].token_ids == answers(named("llama"))[0][:3]


@pytest.mark.parametrize("architecture", REFUSED, ids=str)
def test_fault_09_unsupported_features_are_named(architecture: Architecture) -> None:
    model = build(architecture)
    with pytest.raises(UnsupportedModelError, match=architecture.refused) as caught:
        build_runner(model)
    assert type(model).__name__ in str(caught.value)
    with pytest.raises(UnsupportedModelError, match=architecture.refused):
        specdec.generate(model, one(PROMPTS[0]), max_new_tokens=2)
