"""The load test measures what it says: on an engine and a clock known by hand, then on a tiny model, end to end."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from specdec import ConfigError, InputError, QueueFullError
from specdec.eval import serve as serving
from specdec.eval.arrivals import PROCESSES, Arrival, arrivals
from specdec.eval.load import Load, LoadConfig, Moment, Timeline
from specdec.eval.outcomes import Outcome, goodput, summarise
from specdec.eval.serve_plot import plot_serve
from specdec.stats import RequestStats
from tests.tiny_chat_model import save_tiny_chat_model


def some(**options: Any) -> list[Arrival]:
    given = {"process": "poisson", "rate": 2.0, "num_requests": 50, "duration_s": None, "abort_share": 0.0}
    given |= {"max_new_tokens": 8, "seed": 0, **options}
    return list(itertools.islice(arrivals([[1], [2], [3]], **given), 5000))


class TestArrivals:
    def test_a_seed_gives_the_same_load_and_another_one_another(self) -> None:
        assert some() == some()
        assert [a.at_s for a in some()] != [a.at_s for a in some(seed=1)]

    def test_gaps_of_a_poisson_process(self) -> None:
        times = [a.at_s for a in some(num_requests=4000)]
        gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(0.5, rel=0.06)
        assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # exponential: 1 / e

    def test_constant_and_burst(self) -> None:
        assert [a.at_s for a in some(process="constant", num_requests=4)] == [0.0, 0.5, 1.0, 1.5]
        assert [a.at_s for a in some(process="burst", num_requests=3)] == [0.0] * 3

    def test_nothing_comes_after_the_duration(self) -> None:
        assert [a.at_s for a in some(process="constant", num_requests=None, duration_s=1.5)] == [0.0, 0.5, 1.0]
        assert all(a.at_s < 7 for a in some(num_requests=None, duration_s=7.0))

    def test_prompts_are_all_used_before_one_comes_again(self) -> None:
        order = [a.prompt for a in some(num_requests=30)]
        assert all(sorted(order[i : i + 3]) == [0, 1, 2] for i in range(0, 30, 3))
        assert order[:3] * 10 != order

    def test_aborts_are_a_share_and_change_nothing_else(self) -> None:
        stay, leave = some(num_requests=2000), some(num_requests=2000, abort_share=0.25)
        after = [a.abort_after_tokens for a in leave if a.abort_after_tokens is not None]
        assert len(after) == pytest.approx(500, rel=0.1)
        assert set(after) == set(range(8))
        assert [(a.at_s, a.prompt, a.seed) for a in stay] == [(a.at_s, a.prompt, a.seed) for a in leave]

    def test_bad_loads(self) -> None:
        for options in ({"num_requests": None}, {"num_requests": None, "duration_s": 1.0, "process": "burst"}):
            with pytest.raises(ConfigError, match="allowed: a number, or a"):
                some(**options)
        with pytest.raises(InputError, match="no prompts"):
            LoadConfig().arriving([])
        with pytest.raises(ConfigError, match="did you mean 'poisson'"):
            LoadConfig(arrivals="poison")
        for bad in ({"rate": 0}, {"duration_s": -1.0}, {"slo_ttft_s": 0.0}, {"abort_share": 1.5}, {"num_requests": 0}):
            with pytest.raises(ConfigError, match=next(iter(bad))):
                LoadConfig(**bad)

    def test_every_process_takes_a_rate_and_a_source(self) -> None:
        assert all(next(process(1.0, random.Random(0))) >= 0 for process in PROCESSES.values())


@dataclass
class FakeClock:
    at: float = 100.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds


class FakeEngine:
    """Runs one request at a time: a token per step, and a step takes a second."""

    def __init__(self, clock: FakeClock, max_waiting: int = 99) -> None:
        self.clock, self.max_waiting = clock, max_waiting
        self.live: dict[int, tuple[RequestStats, int]] = {}
        self.ids = itertools.count()
        self.interrupt_at: int | None = None
        self.num_steps = self.num_checks = 0
        self.is_broken = False

    def add_request(self, prompt: Any, *, max_new_tokens: int, **options: Any) -> int:
        if len(self.live) > self.max_waiting:
            raise QueueFullError("full")
        self.live[request_id := next(self.ids)] = (RequestStats(arrival_s=self.clock.at), max_new_tokens)
        return request_id

    def step(self) -> list[Any]:
        self.num_steps += 1
        if self.num_steps == self.interrupt_at:
            raise KeyboardInterrupt
        request_id, (stats, most) = next(iter(self.live.items()))
        if stats.admission_s is None:
            stats.admission_s = self.clock.at
        self.clock.at += 1.0
        stats.emissions.append((self.clock.at, 1))
        done = None
        if len(stats.emissions) == most:
            del self.live[request_id]
            done = SimpleNamespace(stats=stats, finish_reason="length")
        return [SimpleNamespace(index=request_id, token_ids=[7], completion=done)]

    def abort(self, request_id: int) -> Any:
        return SimpleNamespace(stats=self.live.pop(request_id)[0], finish_reason="abort")

    def check_integrity(self) -> None:
        self.num_checks += 1
        assert not self.is_broken, "a block leaks"

    def kv_usage(self) -> dict[str, float]:
        return {"num_blocks": 4, "num_used": len(self.live), "num_cached": 1}

    @property
    def num_running(self) -> int:
        return min(len(self.live), 1)

    @property
    def num_waiting(self) -> int:
        return max(len(self.live) - 1, 0)


def due(*times: float, **options: Any) -> Iterator[Arrival]:
    return iter([Arrival(at, 0, [1, 2], 0, **options) for at in times])


class TestLoad:
    def test_times_count_from_when_a_request_was_due(self) -> None:
        """The second one comes in the middle of a step; the engine hears of it half a second later."""
        clock = FakeClock()
        run = Load(FakeEngine(clock), LoadConfig(max_new_tokens=2), clock).run(due(0.0, 1.5))
        first, second = run.outcomes
        assert (first.queue_s, first.ttft_s, first.tpot_s, first.total_s) == (0.0, 1.0, 1.0, 2.0)
        assert (second.queue_s, second.ttft_s, second.tpot_s, second.total_s) == (0.5, 1.5, 1.0, 2.5)
        assert run.wall_s == 4.0
        assert not clock.slept
        found = summarise(run.outcomes, run.wall_s, 1.2, 2.0)
        assert found["goodput"] == {"num_good": 1, "num_judged": 2, "share": 0.5, "requests_per_s": 0.25}
        assert found["ttft_s"]["p50"] == 1.25
        assert (found["tokens_per_s"], found["longest_gap_s"], found["num_complete"]) == (1.0, 1.0, 2)

    def test_an_idle_engine_is_checked_and_waited_for(self) -> None:
        clock = FakeClock()
        engine = FakeEngine(clock)
        run = Load(engine, LoadConfig(max_new_tokens=1), clock).run(due(0.0, 10.0))
        assert clock.slept == [9.0]
        assert engine.num_checks == run.num_checks == 2
        assert (run.fault, run.is_interrupted) == (None, False)
        assert [m.num_running for m in run.timeline] == [0] * len(run.timeline)

    def test_wrong_books_are_told_and_the_rest_is_measured(self) -> None:
        clock = FakeClock()
        engine = FakeEngine(clock)
        engine.is_broken = True
        run = Load(engine, LoadConfig(max_new_tokens=1), clock).run(due(0.0, 10.0))
        assert (run.fault or "").startswith("a block leaks")
        assert [o.finish_reason for o in run.outcomes] == ["length"] * 2

    def test_refused_requests_are_counted_and_miss(self) -> None:
        clock = FakeClock()
        run = Load(FakeEngine(clock, max_waiting=0), LoadConfig(max_new_tokens=2), clock).run(due(0.0, 0.0, 0.0))
        assert [o.refused for o in run.outcomes] == [None, "QueueFullError", "QueueFullError"]
        found = summarise(run.outcomes, run.wall_s, None, None)
        assert found["refused"] == {"QueueFullError": 2}
        assert found["goodput"]["share"] == pytest.approx(1 / 3)

    @pytest.mark.parametrize("after", [0, 2])
    def test_callers_go_away(self, after: int) -> None:
        clock = FakeClock()
        engine = FakeEngine(clock)
        arriving = [*due(0.0, abort_after_tokens=after), *due(0.0)]
        run = Load(engine, LoadConfig(max_new_tokens=5), clock).run(iter(arriving))
        gone, stays = run.outcomes
        assert (gone.finish_reason, gone.num_tokens) == ("abort", max(after, 1))
        assert (stays.finish_reason, stays.num_tokens) == ("length", 5)
        assert goodput(run.outcomes, 1.0, None, None)["num_judged"] == 1

    def test_callers_who_went_away_too_late_were_missed(self) -> None:
        """An impatient crowd is no reason for a good figure: only who left before a limit is left out."""
        clock = FakeClock()
        arriving = [*due(0.0, 0.0, abort_after_tokens=1), *due(0.0)]
        run = Load(FakeEngine(clock), LoadConfig(max_new_tokens=3), clock).run(iter(arriving))
        assert [(o.ttft_s, o.waited_s) for o in run.outcomes] == [(1.0, 1.0), (2.0, 2.0), (3.0, 5.0)]
        found = summarise(run.outcomes, run.wall_s, 1.5, None)
        assert found["goodput"]["num_judged"] == 2  # the second left after its limit, the first before
        assert found["goodput"]["num_good"] == 0
        assert found["ttft_s"]["p50"] == 2.0

    def test_waiting_without_a_token_passes_a_limit(self) -> None:
        clock = FakeClock()
        engine = FakeEngine(clock)
        engine.interrupt_at = 3
        run = Load(engine, LoadConfig(max_new_tokens=9), clock).run(due(0.0, 0.0))
        assert [(o.ttft_s, o.waited_s) for o in run.outcomes] == [(1.0, 2.0), (None, 2.0)]
        assert goodput(run.outcomes, 1.0, 1.5, None)["num_judged"] == 1
        assert goodput(run.outcomes, 1.0, 2.5, None)["num_judged"] == 0

    def test_an_interrupt_leaves_the_engine_empty_and_a_report(self) -> None:
        clock = FakeClock()
        engine = FakeEngine(clock)
        engine.interrupt_at = 3
        run = Load(engine, LoadConfig(max_new_tokens=2), clock).run(due(0.0, 0.0, 0.0))
        assert run.is_interrupted
        assert [o.finish_reason for o in run.outcomes] == ["length", "abort", "abort"]
        assert not engine.live

    def test_a_timeline_is_bounded_and_even(self) -> None:
        timeline = Timeline()
        for i in range(100_000):
            if timeline.is_due(i * 0.01):
                timeline.add(Moment(i * 0.01, 0, 0, 0.0, 0.0, 0))
        times = [m.at_s for m in timeline.moments]
        assert 500 < len(times) <= 2000
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert max(gaps) < 4 * min(gaps)
        assert times[-1] > 990


def test_what_meets_the_limits() -> None:
    one = Outcome(0.0, 1, finish_reason="stop", ttft_s=1.0, tpot_s=None)
    assert one.meets(1.0, 0.1)  # of one token: no time per further token
    assert not one.meets(0.9, None)
    slow = Outcome(0.0, 1, finish_reason="length", ttft_s=1.0, tpot_s=0.2)
    assert slow.meets(None, 0.2)
    assert not slow.meets(None, 0.1)
    assert not Outcome(0.0, 1, finish_reason="error", ttft_s=0.1).meets(None, None)
    assert not Outcome(0.0, 1, refused="QueueFullError").meets(None, None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def test_end_to_end(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    words = ["target=path", f"target.name={tiny}", "target.dtype=float64", "drafter=ngram", "prompts.limit=3"]
    words += ["load.rate=200", "load.num_requests=30", "load.max_new_tokens=12", "load.abort_share=0.2"]
    words += ["engine.max_batch_size=3", "engine.kv_memory_bytes=400000", "engine.prefix_caching=true"]
    with initialize_config_module("specdec.configs", version_base="1.3"):
        result = serving.measure(compose("serve", words))
    result = json.loads(json.dumps(result))
    assert result["load"] == {**result["config"]["load"]}
    assert result["num_arrived"] == len(result["requests"]) == 30
    assert result["num_complete"] + result["num_aborted"] == 30
    assert result["num_aborted"] > 0
    assert (result["fault"], result["kv"]["num_left"]) == (None, 0)
    phases, requests = result["phases"], result["requests"]
    prompt_tokens = sum(r["num_prompt_tokens"] for r in requests)
    assert phases["prefill"]["num_tokens"] + result["num_cached_tokens"] <= prompt_tokens
    assert result["num_cached_tokens"] > 0
    emitted = sum(r["num_tokens"] for r in requests)
    begun = sum(r["num_tokens"] > 0 for r in requests)
    assert phases["decode"]["num_tokens"] == emitted - begun  # a first token is prefill's
    assert 30 - result["num_aborted"] <= result["goodput"]["num_judged"] <= 30
    assert 0 < result["kv"]["most_used"] <= result["kv"]["most_blocks"]
    assert result["settings"]["kv_memory_bytes"] == 400000
    assert result["model"] == str(tiny)
    shown = Console(record=True, width=80, file=(tmp_path / "shown").open("w"))
    assert serving.show(result, shown)
    text = shown.export_text()
    for word in ("prefill", "TTFT", "decode", "TPOT", "ITL", "goodput", "preemptions", "KV integrity", "clean"):
        assert word in text
    path = plot_serve(result, tmp_path / "plot.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    broken = {**result, "fault": "a block leaks", "is_interrupted": True, "lossless": False}
    assert not serving.show(broken, shown)
    assert "LOSSY" in (text := shown.export_text())
    assert "a block leaks" in text
    assert "interrupted" in text
