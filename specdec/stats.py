"""Counters of generation. Rates are never stored, only derived here, so that every table means the same.

Source of the definitions: docs/design.md, "Metrics".
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace


@dataclass(slots=True)
class StepClock:
    """Lap times of one step."""

    start: float = field(default_factory=time.perf_counter)
    draft_s: float = 0.0
    verify_s: float = 0.0
    end: float = 0.0

    def stop(self) -> None:
        self.end = time.perf_counter()

    @property
    def total_s(self) -> float:
        return self.end - self.start

    @property
    def other_s(self) -> float:
        return self.total_s - self.draft_s - self.verify_s


@dataclass(slots=True)
class RequestStats:
    """What happened to one request. Times in seconds; prefill's token counts in no decode counter."""

    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0  # rows run: not those found in the prefix cache, again those that preemption cost
    num_steps: int = 0  # target decode forwards, those without drafts included
    num_draft_tokens: int = 0  # tree nodes, root excluded
    num_accepted_tokens: int = 0  # up to the first stop
    num_emitted_tokens: int = 0  # by decode steps
    num_truncated: int = 0  # steps whose next token was cut
    num_rejected_drafts: int = 0  # proposals that were invalid and therefore dropped
    num_missed_drafts: int = 0  # proposals that did not come because the drafter had no KV memory left
    num_drafter_errors: int = 0  # exceptions of the drafter, after which the request goes on without drafts
    num_preemptions: int = 0  # times its KV was given up for other requests and computed again later
    num_cached_tokens: int = 0  # of the prompt, whose KV was found in the prefix cache when it was first admitted
    drafted_at: list[int] = field(default_factory=list)  # [i]: steps that drafted at depth i + 1
    reached_at: list[int] = field(default_factory=list)  # [i]: steps that drafted at depth i + 1 and accepted at i
    accepted_at: list[int] = field(default_factory=list)  # [i]: steps that accepted at depth i + 1
    prefill_s: float = 0.0  # of steps that ran prompt rows, the share of its own among all rows
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    arrival_s: float = 0.0
    admission_s: float | None = None  # clock at which it first ran
    emissions: list[tuple[float, int]] = field(default_factory=list)  # (clock, tokens)

    def copy(self) -> RequestStats:
        """Return a copy, for undoing a failed step, that shares `emissions`: that list grows with every step.

        Who restores the copy cuts the list to the length it had, `del emissions[length:]`.
        """
        return replace(
            self,
            drafted_at=list(self.drafted_at),
            reached_at=list(self.reached_at),
            accepted_at=list(self.accepted_at),
        )

    def record_prefill(self, clock: StepClock, own_rows: int, num_rows: int) -> None:
        """Count a step that ran `own_rows` of a prompt among `num_rows`."""
        self.num_prefill_tokens += own_rows
        self.prefill_s += own_rows / num_rows * (clock.total_s - clock.draft_s)

    def record_times(self, clock: StepClock) -> None:
        """Count the time of a decode step."""
        self.draft_s += clock.draft_s
        self.verify_s += clock.verify_s
        self.other_s += clock.other_s

    def record_decode(self, *, drafted: int, depth: int, accepted: int, emitted: int) -> None:
        """Count one decode step: `drafted` nodes down to `depth`, `accepted` of a path, `emitted` tokens."""
        self.num_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_emitted_tokens += emitted
        self.num_truncated += int(emitted == accepted)
        # Nothing is judged deeper than one below the last accepted depth.
        reached = min(depth, accepted + 1)
        for counts, deepest in ((self.drafted_at, depth), (self.reached_at, reached), (self.accepted_at, accepted)):
            counts.extend([0] * (depth - len(counts)))
            for i in range(deepest):
                counts[i] += 1
        self.check()

    def check(self) -> None:
        """Raise AssertionError unless emitted = accepted + steps - truncated."""
        expected = self.num_accepted_tokens + self.num_steps - self.num_truncated
        assert self.num_emitted_tokens == expected, f"{self.num_emitted_tokens} tokens emitted, {expected} counted"

    @property
    def decode_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens (micro); None if nothing was drafted. A tree's is not a chain's."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per target decode forward, the next token included; None without a decode step."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_at_unconditional(self) -> list[float]:
        """[i]: share of all steps that accepted at depth i + 1."""
        return [count / self.num_steps for count in self.accepted_at] if self.num_steps else []

    @property
    def acceptance_at_conditional(self) -> list[float | None]:
        """[i]: share of the steps that accepted at depth i and drafted at i + 1, that accepted there."""
        pairs = zip(self.accepted_at, self.reached_at, strict=True)
        return [accepted / reached if reached else None for accepted, reached in pairs]

    @property
    def ttft_s(self) -> float | None:
        """Request in to first token out."""
        return self.emissions[0][0] - self.arrival_s if self.emissions else None

    @property
    def queue_s(self) -> float | None:
        """Request in to first running."""
        return None if self.admission_s is None else self.admission_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first emission."""
        later = sum(n for _, n in self.emissions[1:])
        return (self.emissions[-1][0] - self.emissions[0][0]) / later if later else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between emissions; tokens per emission stand in `emissions`."""
        clocks = [clock for clock, _ in self.emissions]
        return [b - a for a, b in itertools.pairwise(clocks)]

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.num_prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self.num_emitted_tokens / self.decode_s if self.decode_s else None


def total(parts: Iterable[RequestStats]) -> RequestStats:
    """Return the sum over requests that ran one after the other; emissions are dropped."""
    result = RequestStats()
    for part in parts:
        for name in (
            "num_prompt_tokens",
            "num_prefill_tokens",
            "num_steps",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_emitted_tokens",
            "num_truncated",
            "num_rejected_drafts",
            "num_missed_drafts",
            "num_drafter_errors",
            "num_preemptions",
            "num_cached_tokens",
            "prefill_s",
            "draft_s",
            "verify_s",
            "other_s",
        ):
            setattr(result, name, getattr(result, name) + getattr(part, name))
        for name in ("drafted_at", "reached_at", "accepted_at"):
            longer, shorter = sorted((getattr(result, name), getattr(part, name)), key=len, reverse=True)
            setattr(result, name, [a + (shorter[i] if i < len(shorter) else 0) for i, a in enumerate(longer)])
    return result


@dataclass(slots=True)
class EngineStats:
    """Wall time of an engine by phase, in seconds, and the tokens it ran; steps that did both are split by rows."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0  # emitted by decode rows
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of prompts, not computed because the prefix cache had them
    num_drafter_errors: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    def record_step(self, clock: StepClock, prefill_rows: int, num_rows: int) -> None:
        """Count a step in which `prefill_rows` of `num_rows` were those of prompts."""
        share = prefill_rows / num_rows
        self.num_steps += 1
        self.num_prefill_tokens += prefill_rows
        self.prefill_s += share * (clock.total_s - clock.draft_s)
        self.draft_s += clock.draft_s
        self.verify_s += (1 - share) * clock.verify_s
        self.other_s += (1 - share) * clock.other_s

    def restore(self, saved: EngineStats) -> None:
        """Become what a copy says."""
        for f in fields(self):
            setattr(self, f.name, getattr(saved, f.name))

    @property
    def decode_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.num_prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self.num_decode_tokens / self.decode_s if self.decode_s else None
