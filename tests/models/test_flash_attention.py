"""Whole models over the flash-attn backend (emulated, float64): the same tokens, and which layers it takes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from specdec import LLM, ConfigError
from specdec.errors import OutOfCacheError
from specdec.kv.flash import PAGE_TOKENS, AttentionChoice
from specdec.models import build as building
from tests.kv.flash_emulation import Emulated
from tests.models.architectures import build, named

KERNEL = "CUDA error: no kernel image is available for execution on the device"
PROMPTS = [[(7 * i + i * i // 3) % 64 for i in range(40)], [5, 6, 7]]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    backend = Emulated()

    def choose(device: torch.device, dtype: torch.dtype, wanted: str, block_tokens: int | None) -> AttentionChoice:
        return AttentionChoice(backend if wanted == "auto" else None, "why")

    monkeypatch.setattr(building, "choose_attention", choose)
    return backend


def tokens(model: Any, drafter: str, **options: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(model, drafter=drafter, lean=False, prefill_chunk_tokens=16, **options)
    return [c.token_ids for c in llm.generate(PROMPTS, max_new_tokens=16, ignore_eos=True)], llm


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("llama", 1.0),
        ("mistral_window", 1.0),
        ("gemma2", 1.0),  # window and cap
        ("llama4", 0.5),  # every other layer attends in chunks
        ("gpt_oss", 0.0),  # sinks
        ("deepseek_v3", 0.0),  # keys are wider than values
        ("qwen3", 0.0),  # a width of 12
    ],
)
def test_the_same_tokens(emulated: Emulated, name: str, share: float) -> None:
    model = build(named(name))
    expected, _ = tokens(model, "none", attention="sdpa")
    assert emulated.num_calls == 0
    for drafter in ("none", "ngram"):
        before = emulated.num_calls
        got, llm = tokens(model, drafter)
        assert got == expected
        assert llm.engine.target.cache.block_tokens == PAGE_TOKENS
        calls = (emulated.num_calls - before) / (2 * llm.engine.stats.num_steps)
        # building runs the model once more
        assert calls == pytest.approx(share, abs=0.2 if drafter == "none" else 0.05)


def test_trees_go_elsewhere(emulated: Emulated) -> None:
    model = build(named("llama"))
    expected, _ = tokens(model, "none", attention="sdpa")
    got, llm = tokens(model, "token_recycling")
    assert got == expected
    assert 0 < emulated.num_calls < 2 * llm.engine.stats.num_steps


def test_a_kernel_that_does_not_run_here(emulated: Emulated, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError(KERNEL)

    emulated._function = fails
    with caplog.at_level(logging.INFO, "specdec"):
        got, llm = tokens(build(named("llama")), "none")
    assert llm.engine.target.cache.backend is None
    said = [message for message in caplog.messages if message.startswith("attention:")]
    assert said == [f"attention: SDPA; flash-attn emulated fails for this model: {KERNEL}"], (
        "one line, and the right one"
    )
    assert [len(t) for t in got] == [16, 16]


def test_a_kernel_that_runs_here_is_named_once_per_model(emulated: Emulated, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specdec"):
        for model in (build(named("llama")), build(named("llama"))):
            for _ in range(2):
                tokens(model, "none")
    assert [m for m in caplog.messages if m.startswith("attention:")] == ["attention: flash-attn emulated (why)"] * 2


def test_a_kernel_that_fails_everywhere_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = AttentionChoice(None, f"flash-attn 2.8.3 fails on this device: {KERNEL}", failed=True)
    monkeypatch.setattr(building, "choose_attention", lambda *args: choice)
    tokens(build(named("llama")), "none")
    said = [r for r in caplog.records if r.message.startswith("attention:")]
    assert [(r.levelname, r.message) for r in said] == [("WARNING", f"attention: {choice}")]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OutOfCacheError("no memory")])
def test_no_memory_is_not_the_kernels_fault(emulated: Emulated, error: Exception) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise error

    emulated._function = full
    with pytest.raises(type(error)):
        LLM(build(named("llama"))).generate(PROMPTS, max_new_tokens=2)


def test_quantised_caches_and_models_that_attend_by_themselves_have_none(emulated: Emulated) -> None:
    for llm in (LLM(build(named("llama")), kv_dtype="int8"), LLM(build(named("gptj")))):
        cache = llm.engine.target.cache
        assert (cache.backend, cache.block_tokens) == (None, 16)


def test_unknown_attention() -> None:
    with pytest.raises(ConfigError, match="allowed: 'auto', 'sdpa'"):
        LLM(build(named("llama")), attention="flash")
