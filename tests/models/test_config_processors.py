"""Processors of a model's own generation config, for many prompts: completed once, and anew when it has changed."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

import specdec
from specdec.errors import ConfigError
from specdec.models.config_processors import ConfigProcessors
from tests.decoding import prompts, reference
from tests.models.architectures import build, named

SHORT, LONG = prompts(3, 9)


@pytest.fixture
def model() -> Any:
    return build(named("llama"))


@pytest.fixture
def completions(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every completion of the config."""
    calls: list[int] = []
    complete = model._prepare_generation_config

    def run(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return complete(*args, **options)

    monkeypatch.setattr(model, "_prepare_generation_config", run)
    return calls


def test_completed_once_for_all_prompts(model: Any, completions: list[int]) -> None:
    llm = specdec.LLM(model)
    llm.generate([SHORT, LONG] * 5, max_new_tokens=2)
    llm.generate(LONG, max_new_tokens=5)
    assert len(completions) == 1


def test_each_prompt_gets_its_own(model: Any, completions: list[int]) -> None:
    model.generation_config.eos_token_id = 2
    model.generation_config.min_new_tokens = 4
    processors = ConfigProcessors(model)
    ends = [
        p
        for prompt in (SHORT, LONG)
        for p in processors.of(prompt, 8)
        if isinstance(p, MinNewTokensLengthLogitsProcessor)
    ]
    assert [p.prompt_length_to_skip for p in ends] == [3, 9]
    assert len(completions) == 1


@pytest.mark.parametrize("how", ["a number", "in a list", "another config"])
def test_a_changed_config_counts_at_once(model: Any, how: str) -> None:
    model.generation_config.suppress_tokens = [5]
    llm = specdec.LLM(model)
    before = llm.generate(SHORT, max_new_tokens=12)[0].token_ids
    assert before == reference(model, SHORT, 12)
    if how == "a number":
        model.generation_config.repetition_penalty = 3.0
    elif how == "in a list":
        model.generation_config.suppress_tokens.extend(set(before))
    else:
        model.generation_config = GenerationConfig(suppress_tokens=before)
    after = llm.generate(SHORT, max_new_tokens=12)[0].token_ids
    assert after == reference(model, SHORT, 12) != before


def test_what_is_written_into_the_models_config_is_refused_as_ever(model: Any) -> None:
    processors = ConfigProcessors(model)
    assert processors.of(SHORT, 4) == []
    model.config.repetition_penalty = 2.0
    with pytest.raises(ConfigError, match="repetition_penalty"):
        processors.of(SHORT, 4)
    del model.config.repetition_penalty
    model.generation_config.repetition_penalty = 2.0
    assert [type(p) for p in processors.of(SHORT, 4)] == [RepetitionPenaltyLogitsProcessor]
