"""How fast this device is: t(M), prefill, decoding by drafter, batch and KV dtype."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from specdec.api import LLM, measure_step_times
from specdec.eval.gpu_rig import NO_FLASH, RANDOM, Rig, token_ids
from specdec.eval.gpu_sections import Check, Finding, NotHere
from specdec.eval.peers.interface import wait_for
from specdec.stats import EngineStats

_ATTENTION = ("auto", "sdpa")
_KV_DTYPES = ("int8", "int4")  # KV as computed is what every other check decodes over


def timing_checks(rig: Rig, dtype: torch.dtype) -> Iterator[Check]:
    """Yield the measurements of a target in `dtype`, each of them once."""
    for attention in _ATTENTION:
        yield f"t(M), attention={attention}", partial(_step_times, rig, dtype, attention)
        yield f"prefill, attention={attention}", partial(_prefill, rig, dtype, attention)
    for drafter in rig.config.drafters:
        yield f"decode, {drafter}, one by one", partial(_decode, rig, dtype, drafter, 1)
    best = "eagle3" if not rig.name.startswith(RANDOM) else "ngram"
    sizes = [size for size in rig.config.batch_sizes if size > 1]  # of 1: that is one by one
    for size in sizes:
        for drafter in ("none", best):
            yield f"decode, {drafter}, batch {size}", partial(_decode, rig, dtype, drafter, size)
    size = sizes[-1] if sizes else 1
    for kv_dtype in _KV_DTYPES:
        yield (
            f"decode, none, batch {size}, KV {kv_dtype}",
            partial(_decode, rig, dtype, "none", size, kv_dtype=kv_dtype),
        )


def _llm(rig: Rig, dtype: torch.dtype, drafter: str = "none", **options: Any) -> LLM:
    llm = rig.llm(dtype, drafter, **options)
    if options.get("attention") == "auto" and llm.engine.target.cache.backend is None:
        raise NotHere(NO_FLASH)
    return llm


def _step_times(rig: Rig, dtype: torch.dtype, attention: str) -> Finding:
    llm = _llm(rig, dtype, attention=attention)
    context, rows = rig.config.context_tokens, list(rig.config.rows)
    table = measure_step_times(llm.engine.target, rows=rows, context=context)
    times = {str(int(row["rows"])): row["runner_s"] for row in table}
    shown = ", ".join(f"{m}: {1e3 * s:.2f}" for m, s in times.items())
    return Finding(None, f"ms after {context} tokens: {shown}", {"seconds_by_rows": times})


def _prefill(rig: Rig, dtype: torch.dtype, attention: str) -> Finding:
    """Time a long prompt in one chunk and in chunks of the default size."""
    num_tokens = rig.config.prefill_tokens
    prompt = token_ids(num_tokens, rig.model.config.get_text_config().vocab_size, 1)
    rates = {}
    for chunk in (num_tokens, 512):
        llm = _llm(rig, dtype, attention=attention, prefill_chunk_tokens=chunk)
        times = []
        for _ in range(3):
            wait_for(rig.device)
            start = time.perf_counter()
            llm.generate(prompt, max_new_tokens=1)
            wait_for(rig.device)
            times.append(time.perf_counter() - start)
        rates[str(chunk)] = num_tokens / sorted(times)[1]
    shown = ", ".join(f"{rate:.0f} in chunks of {chunk}" for chunk, rate in rates.items())
    return Finding(None, f"tokens/s of {num_tokens} tokens: {shown}", {"tokens_per_s_by_chunk": rates})


def _decode(rig: Rig, dtype: torch.dtype, drafter: str, size: int, **options: Any) -> Finding:
    """Time answers to the texts, `size` at once."""
    llm = _llm(rig, dtype, drafter, max_batch_size=max(size, 1), **options)
    prompts = [rig.texts[i % len(rig.texts)] for i in range(max(size, len(rig.texts)))]
    how: dict[str, Any] = {"max_new_tokens": rig.config.max_new_tokens, "ignore_eos": True}
    llm.generate(prompts[:size], **how)  # warm-up
    before = {f.name: getattr(llm.engine.stats, f.name) for f in fields(EngineStats)}
    if size == 1:
        done = [c for prompt in prompts for c in llm.generate(prompt, **how)]
    else:
        done = llm.generate(prompts, **how)
    stats = EngineStats(**{name: getattr(llm.engine.stats, name) - value for name, value in before.items()})
    steps = sum(c.stats.num_steps for c in done)
    length = sum(c.stats.num_emitted_tokens for c in done) / steps if steps else None
    values = {
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "other_s": stats.other_s,
        "acceptance_length": length,
        "batch_size": size,
    }
    rate = f"{stats.decode_tokens_per_s:.0f}" if stats.decode_tokens_per_s else "-"
    accepted = f", {length:.2f} per forward" if length is not None else ""
    split = f"draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s, other {stats.other_s:.2f} s"
    return Finding(None, f"{rate} tokens/s{accepted}; {split}", values)
