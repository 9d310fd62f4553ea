"""Is the output on this device the target's own: greedy ids, attention kernels, paging, quantised KV."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.api import LLM
from specdec.debug.near_tie import behind, first_difference, near_tie_limit
from specdec.eval.gpu_rig import Rig, parse_half
from specdec.eval.gpu_sections import Check, Finding, NotHere
from specdec.eval.lossless import check_drafter

_CHUNK = 128  # prompts of more tokens are prefilled in chunks
# A value next to the border of two codes is stored as either, so quantised KV turns rounding into steps.
_TIES = {"int8": torch.float16, "int4": torch.bfloat16}
# How much further from float32 the kernel may be than torch's attention, as flash-attn's own tests allow.
_TIMES, _SHARE = 2.0, 1e-3


def float32_checks(rig: Rig) -> Iterator[Check]:
    """Yield the comparisons with transformers' greedy generate() in float32, chains and trees, alone and in a batch."""
    for drafter in rig.config.drafters:
        yield drafter, partial(_greedy, rig, torch.float32, drafter)
    yield "prefix caching", partial(_prefixes, rig)
    yield "preemption", partial(_preempted, rig)


def half_checks(rig: Rig) -> Iterator[Check]:
    """Yield the same in half precision, where answers may part at near-ties."""
    for name in rig.config.half_dtypes:
        dtype = parse_half(name)
        for drafter in rig.config.drafters:
            yield f"{drafter} in {name}", partial(_greedy, rig, dtype, drafter)


def attention_checks(rig: Rig) -> Iterator[Check]:
    """Yield the comparisons of flash-attn's logits with those of torch's attention."""
    for name in rig.config.half_dtypes:
        yield f"flash-attn in {name}", partial(_flash, rig, parse_half(name))


def kv_checks(rig: Rig) -> Iterator[Check]:
    """Yield the comparisons of drafting with no drafting over quantised KV."""
    for name in _TIES:
        yield f"KV in {name}", partial(_quantised, rig, name)


def _greedy(rig: Rig, dtype: torch.dtype, drafter: str, **options: Any) -> Finding:
    llm = rig.llm(dtype, drafter, prefill_chunk_tokens=_CHUNK, **options)
    return _compared(rig, dtype, llm, drafter, (1, len(rig.prompts)))


def _compared(rig: Rig, dtype: torch.dtype, llm: LLM, drafter: str, sizes: tuple[int, ...]) -> Finding:
    """Return whether an LLM's answers are transformers', in batches of these sizes."""
    checks = [check_drafter(llm, drafter, n, rig.prompts, rig.expected(dtype), rig.rules) for n in sizes]
    stats = llm.engine.stats
    parted = [
        f"prompt {d['prompt']} at {d['position']} (gaps {d['gap']:.1e}, {d['engine_gap']:.1e})"
        for check in checks
        for d in check["divergences"]
    ]
    same = ", ".join(f"{c['identical']}/{c['num_prompts']} in batches of {c['batch_size']}" for c in checks)
    detail = f"identical: {same}" + "".join(f"; {p}" for p in parted)
    values = {"checks": checks, "num_cached": stats.num_cached_tokens, "num_preemptions": stats.num_preemptions}
    return Finding(all(c["lossless"] for c in checks), detail, values)


def _prefixes(rig: Rig) -> Finding:
    """Answer the prompts twice; the second time their blocks are known."""
    llm = rig.llm(torch.float32, "ngram", prefill_chunk_tokens=_CHUNK, prefix_caching=True)
    everything = (len(rig.prompts),) * 2
    found = _compared(rig, torch.float32, llm, "ngram", everything)
    hits = llm.engine.stats.num_cached_tokens
    return Finding(bool(found.good) and hits > 0, f"{found.detail}; {hits} prompt tokens found", found.values)


def _preempted(rig: Rig) -> Finding:
    """Answer the prompts in KV memory that holds only one of the long ones and a little more."""
    most = max(map(len, rig.prompts)) + rig.config.max_new_tokens
    per_token = rig.llm(torch.float32).engine.target.cache.bytes_per_token
    llm = rig.llm(torch.float32, prefill_chunk_tokens=_CHUNK, kv_memory_bytes=int(1.25 * most) * per_token)
    found = _compared(rig, torch.float32, llm, "none", (len(rig.prompts),))
    return Finding(found.good, f"{found.detail}; {llm.engine.stats.num_preemptions} preemptions", found.values)


class _Scores:
    """A logits processor that changes nothing and keeps the logits [V] after each token path."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.after[tuple(input_ids[0].tolist())] = scores[0].double().cpu()
        return scores


def _scores(llm: LLM, prompts: list[list[int]], num_tokens: int) -> dict[tuple[int, ...], Tensor]:
    kept = _Scores()
    llm.generate(prompts, max_new_tokens=num_tokens, ignore_eos=True, logits_processor=[kept])
    return kept.after


def _flash(rig: Rig, dtype: torch.dtype) -> Finding:
    """Compare logits of prefill, chunks, plain decoding and chains with both attentions, and both with float32."""
    flash = rig.llm(dtype, prefill_chunk_tokens=_CHUNK)
    backend = flash.engine.target.cache.backend
    if backend is None:
        raise NotHere("flash-attn does not run here; the lines 'attention' say why")
    chains = rig.llm(dtype, "ngram", prefill_chunk_tokens=_CHUNK)
    sdpa = rig.llm(dtype, prefill_chunk_tokens=_CHUNK, attention="sdpa")
    before = backend.num_calls
    ours = {**_scores(chains, rig.prompts, 6), **_scores(flash, rig.prompts, 6)}
    calls = backend.num_calls - before
    theirs = _scores(sdpa, rig.prompts, 6)
    common = [path for path in ours if path in theirs]
    exact = _scores(rig.llm(torch.float32), [list(path) for path in common], 1)
    largest = max(float(exact[p].abs().max()) for p in common)
    off = {
        name: max(float((scores[p] - exact[p]).abs().max()) for p in common) / largest
        for name, scores in (("flash-attn", ours), ("SDPA", theirs))
    }
    good = calls > 0 and off["flash-attn"] <= _TIMES * off["SDPA"] + _SHARE
    detail = f"off from float32 by {off['flash-attn']:.2e} of the largest logit, SDPA by {off['SDPA']:.2e}"
    return Finding(good, f"{detail}; {len(common)} rows, {calls} calls", {**off, "num_calls": calls})


def _quantised(rig: Rig, kv_dtype: str) -> Finding:
    """Compare drafted answers with undrafted ones over the same quantised KV."""
    options: dict[str, Any] = {"prefill_chunk_tokens": _CHUNK, "kv_dtype": kv_dtype}
    plain, drafted = (rig.llm(torch.float32, name, **options) for name in ("none", "ngram"))
    both = [
        [c.token_ids for c in llm.generate(rig.prompts, max_new_tokens=rig.config.max_new_tokens, ignore_eos=True)]
        for llm in (plain, drafted)
    ]
    limit = near_tie_limit(_TIES[kv_dtype])
    parted = []
    for prompt, expected, got in zip(rig.prompts, *both, strict=True):
        position = first_difference(expected, got)
        if position is not None:
            prefix = [*prompt, *expected[:position]]
            scores = _scores(plain, [prefix], 1)[tuple(prefix)]
            parted.append(behind(scores, (expected[position], got[position])))
    exact = rig.llm(torch.float32).engine.target.cache.bytes_per_token
    share = plain.engine.target.cache.bytes_per_token / exact
    detail = f"{len(rig.prompts) - len(parted)}/{len(rig.prompts)} equal the undrafted; {share:.3f} of the bytes"
    if parted:
        detail += f"; parted by {max(parted):.1e} at most ({limit:g} is a near-tie)"
    return Finding(all(p < limit for p in parted), detail, {"parted": parted, "bytes_share": share})
