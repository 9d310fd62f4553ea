"""Steps of an engine as a draft-length policy sees them: time is t(M) and what drafting takes, acceptance is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from specdec.acceptance import Verdict
from specdec.draft_length import DraftLength
from specdec.interfaces import SamplingParams
from specdec.request import Request, StopRules
from specdec.scheduler import Scheduler, Work


@dataclass(frozen=True)
class Times:
    """t(M), piecewise linear through known points."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: int) -> float:
        last = len(self.rows) - 1
        i = next((i for i in range(1, last) if rows <= self.rows[i]), last)
        (a, b), (s, t) = self.rows[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return s + (t - s) * (rows - a) / (b - a)


# The built-in model on two cores; arithmetic-bound from the first row on; bound by reading weights up to 256 rows.
CPU = Times((1, 2, 4, 8, 16, 32), (0.0177, 0.0187, 0.0192, 0.0225, 0.0258, 0.0368))
STEEP = Times((1, 2, 512), (0.010, 0.0145, 2.3095))
FLAT = Times((1, 256, 512), (0.010, 0.0102, 0.0204))

DraftSeconds = Callable[[int, int], float]  # requests, depth -> seconds
Accepts = Callable[[int, int, int], float]  # request number, tokens it has, depth -> probability of acceptance


def per_token(seconds: float, times: Times = CPU) -> DraftSeconds:
    """A model drafter: one batched forward per depth."""
    return lambda batch, depth: depth * seconds * times.at(batch) / times.at(1)


@dataclass
class Run:
    """What happened; `drafted`: (request number, tokens it had, depth) of every request and step that was asked."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    drafted: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens


def simulate(
    policy: DraftLength,
    times: Times,
    draft_s: DraftSeconds,
    accepts: Accepts,
    *,
    lengths: Sequence[int],
    batch: int = 1,
    cap: int = 8,
    prompt: int = 1,
    seed: int = 0,
    answers: float = 1.0,
    branching: int = 1,
    first: int = 0,
) -> Run:
    """Run requests of `lengths` new tokens, `batch` at a time, and return the totals.

    Args:
        policy: under test.
        times: real t(M).
        draft_s: real seconds of drafting, also where there is no answer.
        accepts: probability that a draft token is accepted, given that the ones before it are.
        lengths: new tokens of each request.
        batch: running at most at once.
        cap: `max_draft_tokens`.
        prompt: its tokens.
        seed: of the dice.
        answers: probability that the drafter has a draft at all.
        branching: siblings at each depth, one of which may be accepted.
        first: number of the first request; a policy must not see one twice.
    """
    dice = random.Random(seed)
    scheduler = Scheduler(max_batch_size=batch, prefill_chunk_tokens=512, max_draft_tokens=cap)
    for number, length in enumerate(lengths, first):
        stop = StopRules(max_new_tokens=length)
        scheduler.add(Request(number, [1] * prompt, SamplingParams(), stop, 0))
    run = Run()
    while scheduler.running or scheduler.waiting:
        scheduler.admit(lambda request: True)
        work = policy.allot(scheduler.schedule())
        verdicts = []
        for w in work:
            has_answer = w.max_draft_tokens > 0 and dice.random() < answers
            depth = w.max_draft_tokens // branching if has_answer else 0
            verdicts.append(_verdict(w, depth, branching, accepts, dice))
            if w.max_draft_tokens:
                run.drafted.append((w.request.request_id, len(w.request.new_tokens), depth))
        asked = sum(w.max_draft_tokens > 0 for w in work)
        spent = draft_s(asked, max(v.depth for v in verdicts)) if asked else 0.0
        run.seconds += times.at(sum(w.num_rows + v.drafted for w, v in zip(work, verdicts, strict=True))) + spent
        run.num_steps += 1
        for w, verdict in zip(work, verdicts, strict=True):
            w.request.tokens.extend(verdict.tokens)
            w.request.num_computed += w.num_rows + max(0, len(verdict.tokens) - 1)
            w.request.finish_reason = verdict.finish_reason
            run.num_tokens += len(verdict.tokens)
            run.num_draft_tokens += verdict.drafted
        policy.learn(work, verdicts, spent)
        for w in work:
            if w.request.finish_reason:
                scheduler.remove(w.request)
                policy.release(w.request.request_id)
    return run


def _verdict(work: Work, depth: int, branching: int, accepts: Accepts, dice: random.Random) -> Verdict:
    request = work.request
    have, accepted = len(request.new_tokens), 0
    while accepted < depth and dice.random() < accepts(request.request_id, have + accepted, accepted):
        accepted += 1
    tokens, reason = request.crop([2] * (accepted + 1)) if work.samples else ([], None)
    return Verdict(
        torch.arange(work.num_rows), tokens, reason, None, min(accepted, len(tokens)), depth * branching, depth
    )


class Fixed:
    """`static` with a cap of its own; 0 = no drafting."""

    name = "fixed"
    min_confidence = 0.0

    def __init__(self, length: int) -> None:
        self.length = length

    def allot(self, work: Sequence[Work]) -> Sequence[Work]:
        return [replace(w, max_draft_tokens=min(self.length, w.max_draft_tokens)) for w in work]

    def learn(self, work: Sequence[Work], verdicts: Sequence[Verdict], draft_s: float) -> None: ...

    def release(self, request_id: int) -> None: ...
