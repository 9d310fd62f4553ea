"""The load generator: adds what has come, steps the engine, collects. One thread, one clock, no server between."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil

from specdec.errors import ConfigError, SpecdecError
from specdec.eval.arrivals import PROCESSES, Arrival, arrivals
from specdec.eval.outcomes import Outcome
from specdec.registry import refuse_unknown

_MOST_MOMENTS = 2000  # of the timeline: when there are more, every other one is dropped and half as many are taken
_DEFAULT_REQUESTS = 64
_IDLE_CHECK_S = 1.0  # at most so often integrity is checked while the engine has nothing to do


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """What is asked of an engine. One default per knob, here."""

    arrivals: str = "poisson"  # or "constant", "burst": all at once
    rate: float = 1.0  # requests per second on average
    num_requests: int | None = None  # None: as many as come in duration_s, or 64
    duration_s: float | None = None  # nothing comes from then on; what has come is answered
    max_new_tokens: int = 64
    ignore_eos: bool = False
    temperature: float = 0.0
    abort_share: float = 0.0  # callers that go away before the end
    slo_ttft_s: float | None = 2.0  # what counts as good: both limits met
    slo_tpot_s: float | None = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arrivals not in PROCESSES:
            refuse_unknown("arrivals", [self.arrivals], PROCESSES)
        positive = {"rate": self.rate, "duration_s": self.duration_s, "num_requests": self.num_requests}
        positive |= {
            "slo_ttft_s": self.slo_ttft_s,
            "slo_tpot_s": self.slo_tpot_s,
            "max_new_tokens": self.max_new_tokens,
        }
        for name, value in positive.items():
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value}; allowed: a number over 0")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}; allowed: 0, which is greedy, or more")
        if not 0 <= self.abort_share <= 1:
            raise ConfigError(f"abort_share={self.abort_share}; allowed: 0 to 1, a share of the requests")

    def arriving(self, prompts: Sequence[Sequence[int]]) -> Iterator[Arrival]:
        """Yield the requests as they come; a burst without a number is one of 64.

        Raises:
            InputError: there are no prompts.
        """
        number = self.num_requests
        if number is None and (self.duration_s is None or self.arrivals == "burst"):
            number = _DEFAULT_REQUESTS
        return arrivals(
            prompts,
            process=self.arrivals,
            rate=self.rate,
            num_requests=number,
            duration_s=self.duration_s,
            abort_share=self.abort_share,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
        )


class Clock(Protocol):
    """Where time comes from. It must be the one that the engine stamps emissions with."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The engine's own clock."""

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


@dataclass(frozen=True, slots=True)
class Moment:
    """The engine at one time."""

    at_s: float
    num_running: int
    num_waiting: int
    kv_used: int  # KV blocks that requests hold
    kv_cached: int  # and those that are only kept for prompts which begin alike
    rss_bytes: int


@dataclass(slots=True)
class Timeline:
    """Moments about evenly spread over a run of any length, in bounded memory."""

    moments: list[Moment] = field(default_factory=list)
    every_s: float = 0.02
    _next_s: float = 0.0

    def is_due(self, at_s: float) -> bool:
        return at_s >= self._next_s

    def add(self, moment: Moment) -> None:
        """Keep a moment."""
        self.moments.append(moment)
        if len(self.moments) > _MOST_MOMENTS:
            del self.moments[1::2]
            self.every_s *= 2
        self._next_s = moment.at_s + self.every_s


@dataclass(frozen=True, slots=True)
class Run:
    """What a load did to an engine."""

    outcomes: list[Outcome]
    timeline: list[Moment]
    wall_s: float
    most_kv: int  # most KV blocks that requests held between two steps
    num_checks: int  # of the KV cache's books, while idle and at the end
    fault: str | None  # the first thing that was wrong there
    is_interrupted: bool  # by Ctrl-C: what was under way was aborted


class Load:
    """One load on one engine.

    Args:
        engine: a `specdec.Engine` that nobody else steps.
        config: what is asked of it.
        clock: for tests.
    """

    def __init__(self, engine: Any, config: LoadConfig, clock: Clock | None = None) -> None:
        self._engine, self._config, self._clock = engine, config, clock or WallClock()
        self._start = 0.0
        self._outcomes: list[Outcome] = []
        self._live: dict[int, tuple[Outcome, Arrival]] = {}  # by request id
        self._leaving: set[int] = set()  # live ones whose callers go away
        self._timeline = Timeline()
        self._process = psutil.Process()
        self._most_kv = 0
        self._checked_s, self._num_checks = -_IDLE_CHECK_S, 0
        self._fault: str | None = None

    def run(self, arriving: Iterator[Arrival]) -> Run:
        """Drive the engine until everything that came is over, or until Ctrl-C."""
        self._start = self._clock.now()
        is_interrupted = False
        try:
            self._drive(arriving)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            for request_id in list(self._live):  # whatever happened, the engine is left empty
                self._abort(request_id)
        wall_s = self._now()
        self._check()
        return Run(
            self._outcomes,
            self._timeline.moments,
            wall_s,
            self._most_kv,
            self._num_checks,
            self._fault,
            is_interrupted,
        )

    def _drive(self, arriving: Iterator[Arrival]) -> None:
        coming = next(arriving, None)
        while coming is not None or self._live:
            while coming is not None and coming.at_s <= self._now():
                self._add(coming)
                coming = next(arriving, None)
            if self._live:
                self._step()
            elif coming is not None:
                self._wait(coming.at_s)
            self._look()

    def _now(self) -> float:
        return self._clock.now() - self._start

    def _add(self, arrival: Arrival) -> None:
        outcome = Outcome(arrival.at_s, len(arrival.prompt_token_ids))
        self._outcomes.append(outcome)
        config = self._config
        try:
            request_id = self._engine.add_request(
                arrival.prompt_token_ids,
                max_new_tokens=config.max_new_tokens,
                ignore_eos=config.ignore_eos,
                temperature=config.temperature,
                seed=arrival.seed if config.temperature else None,
            )
        except SpecdecError as error:
            outcome.refused = type(error).__name__
            return
        self._live[request_id] = (outcome, arrival)
        if arrival.abort_after_tokens is not None:
            self._leaving.add(request_id)

    def _step(self) -> None:
        for piece in self._engine.step():
            outcome, _ = self._live[piece.index]
            outcome.num_tokens += len(piece.token_ids)
            if piece.completion is not None:
                del self._live[piece.index]
                self._leaving.discard(piece.index)
                outcome.finish(piece.completion.stats, self._start, piece.completion.finish_reason, self._clock.now())
        for request_id in list(self._leaving):
            outcome, arrival = self._live[request_id]
            if outcome.num_tokens >= (arrival.abort_after_tokens or 0):
                self._abort(request_id)

    def _abort(self, request_id: int) -> None:
        outcome, _ = self._live.pop(request_id)
        self._leaving.discard(request_id)
        done = self._engine.abort(request_id)
        if done is not None:
            outcome.finish(done.stats, self._start, done.finish_reason, self._clock.now())

    def _wait(self, until_s: float) -> None:
        now = self._now()
        if now - self._checked_s >= _IDLE_CHECK_S:
            self._checked_s = now
            self._check()
        self._clock.sleep(max(0.0, until_s - self._now()))

    def _check(self) -> None:
        self._num_checks += 1
        try:
            self._engine.check_integrity()
        except AssertionError as error:  # told at the end: a long run's other figures are worth having
            self._fault = self._fault or str(error) or "the KV cache's books are wrong"

    def _look(self) -> None:
        at, kv = self._now(), self._engine.kv_usage()
        used, cached = int(kv["num_used"]), int(kv["num_cached"])
        self._most_kv = max(self._most_kv, used)
        if self._timeline.is_due(at):
            rss = self._process.memory_info().rss
            self._timeline.add(Moment(at, self._engine.num_running, self._engine.num_waiting, used, cached, rss))
