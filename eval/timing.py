"""Timing variants of generation on the same prompts, rotated and interleaved in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import Progress

from specdec.api import LLM
from specdec.eval.peers.hf import TransformersPeer
from specdec.eval.peers.interface import wait_for
from specdec.eval.records import VariantInfo
from specdec.stats import RequestStats


@dataclass(slots=True)
class Sample:
    """One run of one variant on one prompt. Times in seconds."""

    prompt: int
    repeat: int
    num_tokens: int
    ttft_s: float
    decode_s: float  # first token out to last token out
    total_s: float
    token_ids: list[int] = field(repr=False, default_factory=list)
    stats: RequestStats | None = None


def batch_decode_s(stats: Sequence[RequestStats]) -> float:
    """Return the decode time of requests that ran together: from when all have a first token to the last token."""
    emissions = [own.emissions for own in stats]
    return max(e[-1][0] for e in emissions) - max(e[0][0] for e in emissions)


Variant = Callable[[list[int]], Sample]  # prompt ids -> sample, its prompt and repeat still 0


def engine_variant(llm: LLM, max_new_tokens: int, temperature: float, seed: int | None) -> Variant:
    """Return a variant that generates with an LLM, past EOS so that all variants give equal counts."""
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "ignore_eos": True}

    def run(prompt: list[int]) -> Sample:
        wait_for(llm.model.device)
        start = time.perf_counter()
        done = llm.generate(prompt, max_new_tokens=max_new_tokens, **options)[0]
        wait_for(llm.model.device)
        total = time.perf_counter() - start
        stats = done.stats
        decode = stats.emissions[-1][0] - stats.emissions[0][0]
        return Sample(0, 0, len(done.token_ids), stats.ttft_s or 0.0, decode, total, done.token_ids, stats)

    return run


def transformers_variant(model: Any, max_new_tokens: int, temperature: float, seed: int | None) -> Variant:
    """Return a variant that runs transformers' own generate() on the same model, as the peer "transformers"."""
    peer = TransformersPeer(VariantInfo("transformers", "peer"), model, temperature, seed)

    def run(prompt: list[int]) -> Sample:
        start = time.perf_counter()
        answer = peer.run([prompt], [max_new_tokens])[0]
        total = time.perf_counter() - start
        first, last = answer.emissions[0][0], answer.emissions[-1][0]
        return Sample(0, 0, len(answer.token_ids), first, last - first, total, answer.token_ids)

    return run


def run_rotated(
    variants: dict[str, Variant], prompts: Sequence[list[int]], repeats: int, progress: Progress
) -> dict[str, list[Sample]]:
    """Run every variant on every prompt, the order rotated by one each time, after one uncounted warm-up each."""
    names = list(variants)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    bar = progress.add_task("prompts", total=(repeats * len(prompts) + 1) * len(names))
    for name in names:
        variants[name](prompts[0])
        progress.advance(bar)
    turn = 0
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            for offset in range(len(names)):
                name = names[(turn + offset) % len(names)]
                sample = variants[name](prompt)
                sample.prompt, sample.repeat = index, repeat
                samples[name].append(sample)
                progress.advance(bar)
            turn += 1
    return samples
