"""Shared by the end-to-end tests: prompts, transformers' answers, engines, and what the KV cache should hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.build import build_drafter, build_verifiers
from specdec.draft_length import DraftLength
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.interfaces import SamplingParams, Segment
from specdec.models.build import RunnerConfig, runner_for
from specdec.models.runner import ModelRunner
from specdec.request import Request, StopRules

PAD = 0
GREEDY = SamplingParams()


def prompts(*lengths: int, seed: int = 0, vocab_size: int = 64) -> list[list[int]]:
    """Return one random prompt per length, without the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(PAD + 1, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def padded(
    rows: Sequence[Sequence[int]], *, left: bool = True, extra: int = 0, pad: int = PAD
) -> tuple[Tensor, Tensor]:
    """Return ids [B, n] and mask [B, n] of rows padded to the longest plus `extra`."""
    width = max(map(len, rows)) + extra
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where] = torch.tensor(row)
        mask[i, where] = 1
    return ids, mask


def one(row: Sequence[int]) -> Tensor:
    """Return a batch of one, [1, n]."""
    return torch.tensor([list(row)])


def reference(model: Any, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Return the new tokens of transformers' own generate(), greedy unless told otherwise."""
    ids = one(prompt)
    options = {"do_sample": False, **options}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)
    return out[0, len(prompt) :].tolist()


def gap_at_divergence(model: Any, prompt: Sequence[int], left: Sequence[int], right: Sequence[int]) -> float:
    """Return how far apart the model's two answers are where they first differ, over the largest logit."""
    at = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
    with torch.no_grad():
        logits = model(input_ids=one([*prompt, *left[:at]])).logits[0, -1].double()
    return float((logits[left[at]] - logits[right[at]]).abs() / logits.abs().max())


def engine_of(
    model: Any,
    drafter: Any = "none",
    drafter_options: dict[str, Any] | None = None,
    *,
    verifier: Any = "auto",
    runner: ModelRunner | None = None,
    policy: DraftLength | None = None,
    **options: Any,
) -> Engine:
    """Return an engine over a model's shared runner, or over `runner`."""
    runner = runner_for(model) if runner is None else runner
    chosen = build_drafter(drafter, runner, None, drafter_options)
    return Engine(runner, chosen, build_verifiers(verifier), EngineConfig(**options), policy)


def looking_ahead(engine: Engine, tokens: int = 1) -> Engine:
    """Return an engine that lets requests in on so many tokens' memory: with few it soon has to preempt."""
    engine._scheduler.least_ahead = engine._scheduler._ahead = tokens
    return engine


def private_runner(model: Any, **options: Any) -> ModelRunner:
    """Return a runner with an empty cache of its own."""
    return runner_for(model, RunnerConfig(**options)).with_own_cache()


def add(engine: Engine, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> Request:
    """Queue a greedy request, or one with the given sampling and EOS ids."""
    sampling = options.pop("sampling", GREEDY)
    return engine.add_request(list(prompt), sampling, StopRules(max_new_tokens=max_new_tokens, **options))


def drain(engine: Engine, limit: int = 500) -> int:
    """Step until nothing is unfinished; return the number of steps."""
    for count in range(limit):
        if not engine.has_unfinished:
            return count
        engine.step()
    raise AssertionError(f"the engine did not finish in {limit} steps")


def fresh_kv(runner: ModelRunner, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of every layer after one prefill of `tokens` over an empty cache."""
    other = runner.with_own_cache()
    other.cache.open(0, len(tokens))
    other.cache.reserve(0, len(tokens))
    other.forward([Segment(0, torch.tensor(list(tokens)), None, torch.tensor([], dtype=torch.int64))])
    other.cache.commit(0, torch.arange(len(tokens)))
    return [other.cache.contents(0, layer) for layer in other.cache.layers]


def assert_fresh_kv(runner: ModelRunner, request_id: int, tokens: Sequence[int]) -> None:
    """Assert that the committed KV of a request is that of a fresh prefill of the same tokens."""
    length = runner.cache.context_len(request_id)
    if length == 0:
        return
    assert len(tokens) >= length
    for layer, (keys, values) in enumerate(fresh_kv(runner, tokens[:length])):
        got_keys, got_values = runner.cache.contents(request_id, layer)
        torch.testing.assert_close(got_keys, keys, rtol=1e-5, atol=1e-5, msg=f"keys of layer {layer}")
        torch.testing.assert_close(got_values, values, rtol=1e-5, atol=1e-5, msg=f"values of layer {layer}")
