"""Folders of points whose times come from a formula: a machine with a known t(M), drafters of known acceptance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from specdec.eval.records import (
    CONFIG,
    PROVENANCE,
    RECORDS,
    Case,
    End,
    Header,
    LeftOut,
    Machine,
    RecordWriter,
    RequestRecord,
    Sample,
    VariantInfo,
)

ORIGIN = {
    "git_sha": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": False,
    "versions": {"torch-specdec": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.2"},
    "cpu": "A made-up CPU @ 3.0 GHz",
    "gpu": None,
    "num_threads": 2,
    "argv": ["-m", "specdec.eval.speedup", "--multirun", "batch_size=1,4", "drafter=ngram,suffix"],
    "time": "2026-01-02T03:04:05+00:00",
}
VARIANTS = [
    VariantInfo("none", "engine", "none", "match"),
    VariantInfo("control", "engine", "none", "match"),
    VariantInfo("ngram", "engine", "ngram", "match", max_draft_tokens=5),
    VariantInfo("draft_model", "engine", "draft_model", "match", max_draft_tokens=5),
    VariantInfo("eagle3", "engine", "eagle3", "traversal", max_draft_tokens=12),
    VariantInfo("typical", "engine", "draft_model", "typical", lossless=False, max_draft_tokens=5),
    VariantInfo("llama_cpp", "peer", note="other weights: Q8_0 of the same model"),
]
ACCEPTANCE = {"ngram": 0.45, "draft_model": 0.75, "eagle3": 0.8, "typical": 0.85}  # of a draft token, given the last
DRAFT_S = {"ngram": 0.0002, "draft_model": 0.012, "eagle3": 0.004, "typical": 0.012}  # per step
CATEGORIES = ("writing", "coding", "extraction", "math", "multi-turn conversation")


def forward_s(rows: float) -> float:
    """Flat up to 8 rows, then a straight line: what a machine bound by reading and then by arithmetic does."""
    return 0.020 + 0.0002 * rows + 0.0016 * max(0.0, rows - 8)


@dataclass(frozen=True)
class Made:
    """A point to be made up."""

    name: str = "point"
    batch_size: int = 1
    draft_tokens: int = 5
    overrides: dict[str, Any] | None = None
    question: str | None = "Does drafting pay on a small CPU?"
    repeats: int = 2
    num_tokens: int = 40
    num_cases: int = 10
    is_finished: bool = True
    variants: tuple[VariantInfo, ...] = tuple(VARIANTS)
    with_machine: bool = True
    temperature: float = 0.0
    seed: int | None = 0
    forward_s: Callable[[float], float] = forward_s
    noise: float = 1.0  # 0: every forward takes its time exactly
    other_s: float = 0.0006  # of a step
    prompts: Any = None  # of the configuration
    digests: str = ""  # of the prompts they begin with; empty: the records have none


def write_point(folder: Path, made: Made = Made(), origin: dict[str, Any] | None = None) -> Path:
    """Write a point's folder and return it."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"batch_size": made.batch_size, "engine": {"max_draft_tokens": made.draft_tokens}}
    config |= {} if made.prompts is None else {"prompts": made.prompts}
    (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / PROVENANCE).write_text(json.dumps({**ORIGIN, **(origin or {})}))
    dice = random.Random(7)
    digests = [f"{made.digests}{i}" if made.digests else "" for i in range(made.num_cases)]
    cases = [Case(f"c{i}", CATEGORIES[i % 5], 0, 30 + i, made.num_tokens, own) for i, own in enumerate(digests)]
    variants = [replace(v, max_draft_tokens=v.max_draft_tokens and made.draft_tokens) for v in made.variants]
    with RecordWriter(folder / RECORDS) as writer:
        writer.write(_header(made, cases, variants))
        if made.with_machine:
            writer.write(_machine(made.forward_s))
        num_samples, at = 0, 0.0
        for repeat in range(made.repeats):
            for batch in range(made.num_cases // made.batch_size):
                for place, info in enumerate(variants[batch % len(variants) :] + variants[: batch % len(variants)]):
                    own = range(batch * made.batch_size, (batch + 1) * made.batch_size)
                    requests = _requests(info, list(own), made, dice)
                    total_s = max(r.emissions[-1][0] for r in requests)
                    writer.write(Sample(info.name, batch, repeat, place, at, requests))
                    num_samples, at = num_samples + 1, at + total_s
        if made.is_finished:
            writer.write(End(num_samples, at, 0.5))
    return folder


def write_sweep(folder: Path, **changes: Any) -> Path:
    """Write points of several batch sizes and two draft lengths, as a sweep leaves them."""
    for number, (batch_size, draft_tokens) in enumerate([(b, k) for k in (2, 6) for b in (1, 2, 5, 10)]):
        overrides = {"batch_size": batch_size, "engine.max_draft_tokens": draft_tokens, "prompts": "mtbench"}
        name = f"batch_size={batch_size},engine.max_draft_tokens={draft_tokens}"
        made = Made(name, batch_size, draft_tokens, overrides, repeats=1, with_machine=number == 0, **changes)
        write_point(folder / str(number), made)
    return folder


def _header(made: Made, cases: list[Case], variants: list[VariantInfo]) -> Header:
    return Header(
        name=made.name,
        target="smollm2",
        dtype="float32",
        num_parameters=134_515_008,
        kv_bytes_per_token=46_080,
        batch_size=made.batch_size,
        max_new_tokens=made.num_tokens,
        temperature=made.temperature,
        seed=made.seed,
        repeats=made.repeats,
        variants=variants,
        cases=cases,
        absent=[{"name": "openvino", "reason": "pip install openvino-genai"}],
        left_out=[LeftOut("q99", "math", "longer than the context", 9000)],
        overrides=made.overrides or {},
        question=made.question,
    )


def _machine(forward_s: Callable[[float], float]) -> Machine:
    rows = (1, 2, 4, 8, 16, 32, 64, 128)
    times = [{"rows": m, "runner_s": forward_s(m), "transformers_s": 1.3 * forward_s(m)} for m in rows]
    return Machine(times, 27e9, 160e9, 538_000_000)


def _requests(info: VariantInfo, cases: list[int], made: Made, dice: random.Random) -> list[RequestRecord]:
    """Return what a batch of requests that start together would have given."""
    drafted = info.max_draft_tokens or 0
    is_peer = info.kind == "peer"
    depth = min(drafted, 3) if info.name == "eagle3" else drafted
    left = dict.fromkeys(cases, made.num_tokens - 1)
    ttft_s = 0.03 * len(cases) * dice.uniform(0.97, 1.1)
    emissions: dict[int, list[list[float]]] = {case: [[ttft_s, 1]] for case in cases}
    steps: dict[int, list[list[int]]] = {case: [] for case in cases}
    spent = {case: [0.0, 0.0, 0.0] for case in cases}
    at = ttft_s
    while running := [case for case in cases if left[case]]:
        noise = 1 + made.noise * dice.uniform(-0.03, 0.06)
        costs = [DRAFT_S.get(info.name, 0.0), made.forward_s(len(running) * (1 + drafted)), made.other_s]
        costs = [noise * cost * (1.3 if is_peer else 1.0) for cost in costs]
        at += sum(costs)
        for case in running:
            rate = min(0.97, ACCEPTANCE.get(info.name, 0.0) + 0.05 * (case % 5 - 2))
            accepted = 0
            while accepted < depth and dice.random() < rate:
                accepted += 1
            emitted = min(accepted + 1, left[case])
            left[case] -= emitted
            steps[case].append([drafted, depth, min(accepted, emitted), emitted])
            emissions[case].append([at, emitted])
            spent[case] = [a + b for a, b in zip(spent[case], costs, strict=True)]
    ids = {case: [(17 * case + i) % 1000 for i in range(made.num_tokens)] for case in cases}
    if not info.lossless:
        ids = {case: [*own[:9], 5, *own[10:]] for case, own in ids.items()}
    return [
        RequestRecord(case, ids[case], "length", emissions[case])
        if is_peer
        else RequestRecord(case, ids[case], "length", emissions[case], steps[case], ttft_s / len(cases), *spent[case])
        for case in cases
    ]
