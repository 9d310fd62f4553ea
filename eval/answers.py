"""Answers with the steps they came in, counted whole or up to where they begin to repeat themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.api import LLM
from specdec.eval.ratios import micro_interval
from specdec.repetition import first_repeat
from specdec.stats import RequestStats, total


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of one request."""

    drafted: int  # tree nodes, root excluded
    depth: int  # of that tree
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer. `cut`: tokens before it repeats itself, None if it never does."""

    prompt: int
    token_ids: list[int]
    finish_reason: str
    steps: list[Step]
    cut: int | None

    def counted(self, num_tokens: int | None = None) -> RequestStats:
        """Return the counters of the first `num_tokens` tokens, as if a stop had ended the answer there.

        The step in which that falls counts as one step and with its tokens before it.
        """
        stats = RequestStats()
        at = len(self.token_ids) - sum(step.emitted for step in self.steps)  # prefill's token
        for step in self.steps:
            left = step.emitted if num_tokens is None else min(step.emitted, num_tokens - at)
            if left <= 0:
                break
            stats.record_decode(drafted=step.drafted, depth=step.depth, accepted=min(step.accepted, left), emitted=left)
            at += step.emitted
        return stats


class StepLog:
    """A trace that keeps the steps of each request, in the order in which the requests were queued."""

    def __init__(self, other: Any | None) -> None:
        """`other`: a trace that goes on getting the same steps."""
        self._other = other
        self._steps: dict[int, list[Step]] = {}

    def record(self, event: Any) -> None:
        if self._other is not None:
            self._other.record(event)
        for work, verdict in zip(event.work, event.verdicts, strict=True):
            steps = self._steps.setdefault(work.request.request_id, [])
            if not work.is_prefill:
                steps.append(Step(verdict.drafted, verdict.depth, verdict.num_accepted, len(verdict.tokens)))

    def steps(self) -> list[list[Step]]:
        return [self._steps[request_id] for request_id in sorted(self._steps)]


def answer(llm: LLM, first: int, prompts: Sequence[list[int]], **options: Any) -> list[Answer]:
    """Return the answers to a batch of prompts, numbered from `first`, with their steps."""
    engine = llm.engine
    before = engine.trace
    engine.trace = log = StepLog(before)
    try:
        done = llm.generate(list(prompts), **options)
    finally:
        engine.trace = before
    answers = []
    for i, (completion, steps) in enumerate(zip(done, log.steps(), strict=True), first):
        ids = completion.token_ids
        answers.append(Answer(i, ids, completion.finish_reason, steps, first_repeat(ids)))
        ours, engines = answers[-1].counted(), completion.stats
        for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "reached_at"):
            assert getattr(ours, name) == getattr(engines, name), f"prompt {i}: {name} of its steps is not the engine's"
    return answers


def summarise(answers: Iterable[Answer]) -> dict[str, Any]:
    """Return acceptance in three ways: up to each answer's repetition, in all, and of answers that never repeat.

    Only the first has an interval: 95 %, by resampling answers; None if there are not two with decode steps.
    """
    answers = list(answers)
    cut = [a.counted(a.cut) for a in answers]
    pairs = [(float(s.num_emitted_tokens), float(s.num_steps)) for s in cut if s.num_steps]
    return {
        "num_prompts": len(answers),
        "num_loops": sum(a.cut is not None for a in answers),
        "cut": _rates(total(cut))
        | {"acceptance_length_interval": list(micro_interval(pairs)) if len(pairs) > 1 else None},
        "all": _rates(total(a.counted() for a in answers)),
        "no_loops": _rates(total(a.counted() for a in answers if a.cut is None)),
    }


def _rates(stats: RequestStats) -> dict[str, Any]:
    return {
        "num_steps": stats.num_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_emitted_tokens": stats.num_emitted_tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_at_unconditional": stats.acceptance_at_unconditional,
        "acceptance_at_conditional": stats.acceptance_at_conditional,
    }
