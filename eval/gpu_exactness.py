"""Is the output on this device the target's own: greedy ids, paging, quantised KV."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from specdec.api import LLM
from specdec.debug.near_tie import behind, first_difference, near_tie_limit
from specdec.eval.gpu_attention import scores_of
from specdec.eval.gpu_rig import CHUNK_TOKENS, Rig, parse_half
from specdec.eval.gpu_sections import Check, Finding
from specdec.eval.lossless import check_drafter, compare_answers, only_near_ties

# A value next to the border of two codes is stored as either, so quantised KV turns rounding into steps.
_TIES = {"int8": torch.float16, "int4": torch.bfloat16}

_REQUEST_ID = -5  # of no request: it takes memory away


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


def kv_checks(rig: Rig) -> Iterator[Check]:
    """Yield the comparisons of drafting with no drafting over quantised KV."""
    for name in _TIES:
        yield f"KV in {name}", partial(_quantised, rig, name)


def _greedy(rig: Rig, dtype: torch.dtype, drafter: str, **options: Any) -> Finding:
    llm = rig.llm(dtype, drafter, prefill_chunk_tokens=CHUNK_TOKENS, **options)
    return _compared(rig, dtype, llm, drafter, (1, len(rig.prompts)))


def _compared(rig: Rig, dtype: torch.dtype, llm: LLM, drafter: str, sizes: tuple[int, ...]) -> Finding:
    """Return whether an LLM's answers are transformers', in batches of these sizes, and drafts came before them."""
    checks = [check_drafter(llm, drafter, n, rig.prompts, rig.expected(dtype), rig.rules) for n in sizes]
    stats, num_drafted = llm.engine.stats, sum(c["num_draft_tokens"] for c in checks)
    parted = [
        f"prompt {d['prompt']} at {d['position']} (gaps {d['gap']:.1e}, {d['engine_gap']:.1e})"
        for check in checks
        for d in check["divergences"]
    ]
    same = ", ".join(f"{c['identical']}/{c['num_prompts']} in batches of {c['batch_size']}" for c in checks)
    detail = f"identical: {same}" + "".join(f"; {p}" for p in parted)
    if drafter != "none":
        detail += f"; {num_drafted} tokens drafted"
    values = {"checks": checks, "num_cached": stats.num_cached_tokens, "num_preemptions": stats.num_preemptions}
    return Finding(all(c["lossless"] for c in checks) and (num_drafted > 0 or drafter == "none"), detail, values)


def _prefixes(rig: Rig) -> Finding:
    """Answer the prompts twice; the second time their blocks are known."""
    llm = rig.llm(torch.float32, "ngram", prefill_chunk_tokens=CHUNK_TOKENS, prefix_caching=True)
    everything = (len(rig.prompts),) * 2
    found = _compared(rig, torch.float32, llm, "ngram", everything)
    hits = llm.engine.stats.num_cached_tokens
    return Finding(bool(found.good) and hits > 0, f"{found.detail}; {hits} prompt tokens found", found.values)


def _preempted(rig: Rig) -> Finding:
    """Answer the prompts together; when all have begun, memory is gone until one of them was preempted for it.

    Somebody else takes it: how much the engine keeps free for those that run is its own business.
    """
    num_tokens, tokens = rig.config.max_new_tokens, sum(map(len, rig.prompts))
    per_token = rig.llm(torch.float32).engine.target.cache.bytes_per_token
    memory = (tokens + len(rig.prompts) * (num_tokens + 1)) * per_token
    # Blocks of one token, so that everybody's next token needs one.
    options: dict[str, Any] = {"kv_block_tokens": 1, "kv_memory_bytes": memory, "max_draft_tokens": 0}
    llm = rig.llm(torch.float32, prefill_chunk_tokens=CHUNK_TOKENS, **options)
    cache, stats = llm.engine.target.cache, llm.engine.stats
    begun: set[int] = set()
    got: dict[int, list[int]] = {}
    for piece in llm.stream(rig.prompts, max_new_tokens=num_tokens, ignore_eos=True):
        begun.add(piece.index)
        if piece.completion is not None:
            got[piece.index] = piece.completion.token_ids
        is_taken = cache.is_open(_REQUEST_ID)
        if not is_taken and not stats.num_preemptions and len(begun) == len(rig.prompts) and not got:
            num_free = int(cache.usage()["num_free"])
            cache.open(_REQUEST_ID, num_free)
            cache.reserve(_REQUEST_ID, num_free)
        elif is_taken and (stats.num_preemptions or got):
            cache.release(_REQUEST_ID)
    answers = [got[i] for i in range(len(rig.prompts))]
    near_tie = near_tie_limit(torch.float32)
    found = compare_answers(llm, rig.prompts, rig.expected(torch.float32), answers, near_tie)
    most = rig.rules.near_ties_per_prompt * len(rig.prompts)
    good = only_near_ties(found) and len(found["parted"]) <= most and stats.num_preemptions > 0
    detail = f"identical: {found['equal']}/{found['of']}; {stats.num_preemptions} preemptions"
    return Finding(good, detail, {"check": found, "num_preemptions": stats.num_preemptions})


def _quantised(rig: Rig, kv_dtype: str) -> Finding:
    """Compare drafted answers with undrafted ones over the same quantised KV."""
    options: dict[str, Any] = {"prefill_chunk_tokens": CHUNK_TOKENS, "kv_dtype": kv_dtype}
    plain, drafted = (rig.llm(torch.float32, name, **options) for name in ("none", "ngram"))
    both = [
        llm.generate(rig.prompts, max_new_tokens=rig.config.max_new_tokens, ignore_eos=True) for llm in (plain, drafted)
    ]
    num_drafted = sum(c.stats.num_draft_tokens for c in both[1])
    limit = near_tie_limit(_TIES[kv_dtype])
    parted = []
    for prompt, expected, got in zip(rig.prompts, *([c.token_ids for c in done] for done in both), strict=True):
        position = first_difference(expected, got)
        if position is not None:
            prefix = [*prompt, *expected[:position]]
            scores = scores_of(plain, [prefix], 1)[tuple(prefix)]
            parted.append(behind(scores, (expected[position], got[position])))
    exact = rig.llm(torch.float32).engine.target.cache.bytes_per_token
    share = plain.engine.target.cache.bytes_per_token / exact
    same = f"{len(rig.prompts) - len(parted)}/{len(rig.prompts)} equal the undrafted"
    detail = f"{same}; {num_drafted} tokens drafted; {share:.3f} of the bytes"
    if parted:
        detail += f"; parted by {max(parted):.1e} at most ({limit:g} is a near-tie)"
    good = num_drafted > 0 and all(p < limit for p in parted)
    return Finding(good, detail, {"parted": parted, "bytes_share": share, "num_drafted": num_drafted})
