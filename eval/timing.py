"""Timing variants of generation on the same prompts, rotated and interleaved in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import Progress
from transformers.generation.streamers import BaseStreamer

from specdec.api import LLM
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


def _wait(device: torch.device) -> None:
    """Wait for what an accelerator still has to do, so that a clock read next includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


Variant = Callable[[list[int]], Sample]  # prompt ids -> sample, its prompt and repeat still 0


def engine_variant(llm: LLM, max_new_tokens: int, temperature: float, seed: int | None) -> Variant:
    """Return a variant that generates with an LLM, past EOS so that all variants give equal counts."""
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "ignore_eos": True}

    def run(prompt: list[int]) -> Sample:
        _wait(llm.model.device)
        start = time.perf_counter()
        done = llm.generate(prompt, max_new_tokens=max_new_tokens, **options)[0]
        _wait(llm.model.device)
        total = time.perf_counter() - start
        stats = done.stats
        decode = stats.emissions[-1][0] - stats.emissions[0][0]
        return Sample(0, 0, len(done.token_ids), stats.ttft_s or 0.0, decode, total, done.token_ids, stats)

    return run


class _Clock(BaseStreamer):
    """Notes when transformers hands out its first and last token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def transformers_variant(model: Any, max_new_tokens: int, temperature: float, seed: int | None) -> Variant:
    """Return a variant that runs transformers' own generate() on the same model.

    What the model's generation config says of logits (a repetition penalty, suppressed tokens) applies, as in the
    engine's variants; its top-k and top-p do not, as there.
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    def run(prompt: list[int]) -> Sample:
        ids = torch.tensor([prompt], device=model.device)
        clock = _Clock()
        if seed is not None:
            torch.manual_seed(seed)
        _wait(model.device)
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=-1,  # never met: past EOS, as the engine's variants
            pad_token_id=0,
            streamer=clock,
            **sampling,
        )
        _wait(model.device)
        total = time.perf_counter() - start
        first, last = clock.times[1], clock.times[-1]  # the prompt is put first
        new = out[0, len(prompt) :].tolist()
        return Sample(0, 0, len(new), first - start, last - first, total, new)

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
