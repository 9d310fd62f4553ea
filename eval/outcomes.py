"""What became of each request of a load, and the figures over all of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.serving.metrics import percentiles
from specdec.stats import RequestStats, total


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds from when it was due, whether or not the engine was in a step just then.

    A load is open: requests come when they come. Were the clock started when the engine takes a request, waiting for
    the step that runs would be in no figure.
    """

    arrival_s: float  # after the load began
    num_prompt_tokens: int
    refused: str | None = None  # why it was not taken: the kind of the error
    finish_reason: str | None = None  # "stop", "length", "abort" (its caller went away), "error"
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None  # to the last token
    waited_s: float | None = None  # to the end, or to when its caller went away
    num_tokens: int = 0
    gaps_s: Sequence[float] = ()  # between emissions
    stats: RequestStats | None = None  # without emissions

    def finish(self, stats: RequestStats, start_s: float, reason: str, now_s: float) -> None:
        """Take what the engine counted; its clock showed `start_s` when the load began and shows `now_s`."""
        due = start_s + self.arrival_s
        times = [at for at, _ in stats.emissions]
        self.finish_reason, self.waited_s = reason, now_s - due
        self.num_tokens = sum(n for _, n in stats.emissions)
        self.queue_s = None if stats.admission_s is None else stats.admission_s - due
        if times:
            self.ttft_s, self.total_s = times[0] - due, times[-1] - due
        self.tpot_s = stats.tpot_s
        self.gaps_s = array("d", stats.itl_s)
        self.stats = stats.copy()
        self.stats.emissions = []  # the gaps say the same in a tenth of the memory

    @property
    def is_complete(self) -> bool:
        return self.finish_reason in ("stop", "length")

    def meets(self, slo_ttft_s: float | None, slo_tpot_s: float | None) -> bool:
        """Tell whether it was answered to its end and in time. An answer of one token has no TPOT to miss."""
        if not self.is_complete or self.ttft_s is None:
            return False
        return not self.is_late(slo_ttft_s, slo_tpot_s)

    def is_late(self, slo_ttft_s: float | None, slo_tpot_s: float | None) -> bool:
        """Tell whether a limit was passed by the time it ended, whoever ended it."""
        first = self.waited_s if self.ttft_s is None else self.ttft_s
        return any(
            limit is not None and spent is not None and spent > limit
            for spent, limit in ((first, slo_ttft_s), (self.tpot_s, slo_tpot_s))
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        names = ("arrival_s", "num_prompt_tokens", "num_tokens", "refused", "finish_reason")
        times = ("queue_s", "ttft_s", "tpot_s", "total_s")
        own = {name: getattr(self, name) for name in (*names, *times)}
        stats = self.stats or RequestStats()
        counts = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_preemptions", "num_cached_tokens")
        return own | {name: getattr(stats, name) for name in counts} | {"longest_gap_s": max(self.gaps_s, default=None)}


def goodput(
    outcomes: Iterable[Outcome], wall_s: float, slo_ttft_s: float | None, slo_tpot_s: float | None
) -> dict[str, float | int | None]:
    """Return how many requests were answered within both limits: their number, share and rate.

    Those that were refused, or failed, count as missed; so do those whose callers went away after a limit was passed.
    Callers who went away before that are left out: nobody knows whether they would have been in time.

    Source: Zhong et al. 2024 (DistServe), arXiv 2401.09670, section 2: SLO attainment.
    """
    judged = [o for o in outcomes if o.finish_reason != "abort" or o.is_late(slo_ttft_s, slo_tpot_s)]
    good = sum(o.meets(slo_ttft_s, slo_tpot_s) for o in judged)
    return {
        "num_good": good,
        "num_judged": len(judged),
        "share": good / len(judged) if judged else None,
        "requests_per_s": good / wall_s if wall_s else None,
    }


def summarise(
    outcomes: Sequence[Outcome], wall_s: float, slo_ttft_s: float | None, slo_tpot_s: float | None
) -> dict[str, Any]:
    """Return counts, percentiles, acceptance and goodput over the requests of a load.

    Queue time and TTFT are of all who got so far, gaps of everybody, and the rest of who was answered to the end.
    """
    complete = [o for o in outcomes if o.is_complete]
    whole = total(o.stats for o in outcomes if o.stats is not None)
    refused: dict[str, int] = {}
    for kind in (o.refused for o in outcomes if o.refused is not None):
        refused[kind] = refused.get(kind, 0) + 1
    gaps = [gap for o in outcomes for gap in o.gaps_s]
    return {
        "num_arrived": len(outcomes),
        "num_complete": len(complete),
        "num_aborted": sum(o.finish_reason == "abort" for o in outcomes),
        "num_failed": sum(o.finish_reason == "error" for o in outcomes),
        "num_refused": sum(refused.values()),
        "refused": refused,
        "queue_s": percentiles(o.queue_s for o in outcomes),
        "ttft_s": percentiles(o.ttft_s for o in outcomes),
        "tpot_s": percentiles(o.tpot_s for o in complete),
        "total_s": percentiles(o.total_s for o in complete),
        "itl_s": percentiles(gaps),
        "longest_gap_s": max(gaps, default=None),
        "tokens_per_s": sum(o.num_tokens for o in outcomes) / wall_s if wall_s else None,
        "acceptance_rate": whole.acceptance_rate,
        "acceptance_length": whole.acceptance_length,
        "num_draft_tokens": whole.num_draft_tokens,
        "num_accepted_tokens": whole.num_accepted_tokens,
        "num_cached_tokens": whole.num_cached_tokens,
        "num_preemptions": whole.num_preemptions,
        "num_drafter_errors": whole.num_drafter_errors,
        "goodput": goodput(outcomes, wall_s, slo_ttft_s, slo_tpot_s),
    }
