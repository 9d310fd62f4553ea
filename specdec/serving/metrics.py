"""What a serving engine measures of its requests: the two phases apart, as percentiles over finished requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from specdec.stats import EngineStats, RequestStats, total

PERCENTILES = (50, 90, 99)
_MOST_KEPT = 1024  # finished requests that percentiles are taken over: the latest


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile, linear between neighbours; None of nothing."""
    return _at(sorted(values), percent)


def _at(ordered: Sequence[float], percent: float) -> float | None:
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return {"p50": ..., "p90": ..., "p99": ...} of the values that are not None."""
    ordered = sorted(v for v in values if v is not None)
    return {f"p{p}": _at(ordered, p) for p in PERCENTILES}


def both(first: EngineStats, second: EngineStats) -> EngineStats:
    """Return the sum of two engines' counters and times."""
    return EngineStats(**{f.name: getattr(first, f.name) + getattr(second, f.name) for f in fields(EngineStats)})


@dataclass(frozen=True, slots=True)
class Moment:
    """An engine between two of its steps, as whoever steps it sees it: in the middle of one the books are open."""

    stats: EngineStats
    kv: dict[str, float]  # see `KVCache.usage`
    drafter_kv: dict[str, float] | None  # of the drafter's own cache, if it has one
    at_s: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """A moment of a serving engine. Times in seconds; definitions as of `RequestStats` and `EngineStats`."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_aborted: int
    num_failed: int  # ended by an exception, above all of their own processor or criterion
    engine: EngineStats
    kv: dict[str, float]  # see `KVCache.usage`
    drafter_kv: dict[str, float] | None  # of the drafter's own cache, if it has one
    acceptance_rate: float | None
    acceptance_length: float | None
    queue_s: dict[str, float | None]
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]
    itl_s: dict[str, float | None]
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)


@dataclass(slots=True)
class Finished:
    """The latest finished requests and how many there were of each kind."""

    kept: deque[RequestStats] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0

    def add(self, stats: RequestStats, reason: str | None) -> None:
        """Count a request that is over."""
        if reason == "abort":
            self.num_aborted += 1
        elif reason == "error":
            self.num_failed += 1
        else:
            self.num_finished += 1
            self.kept.append(stats)

    def metrics(self, moment: Moment, num_running: int, num_waiting: int) -> Metrics:
        """Return the moment's figures. May be called while another thread adds."""
        kept = list(self.kept)
        whole = total(kept)
        return Metrics(
            num_running=num_running,
            num_waiting=num_waiting,
            num_finished=self.num_finished,
            num_aborted=self.num_aborted,
            num_failed=self.num_failed,
            engine=moment.stats,
            kv=moment.kv,
            drafter_kv=moment.drafter_kv,
            acceptance_rate=whole.acceptance_rate,
            acceptance_length=whole.acceptance_length,
            queue_s=percentiles(s.queue_s for s in kept),
            ttft_s=percentiles(s.ttft_s for s in kept),
            tpot_s=percentiles(s.tpot_s for s in kept),
            itl_s=percentiles(gap for s in kept for gap in s.itl_s),
            prefill_tokens_per_s=moment.stats.prefill_tokens_per_s,
            decode_tokens_per_s=moment.stats.decode_tokens_per_s,
        )
