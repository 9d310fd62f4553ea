"""Percentiles and counts, by numbers known by hand."""

from __future__ import annotations

import pytest

from specdec.serving.metrics import Finished, Moment, both, percentile, percentiles
from specdec.stats import EngineStats, RequestStats


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)
    assert percentile(list(range(101)), 99) == 99.0


def test_percentiles_leave_out_what_is_not_known() -> None:
    assert percentiles([None, 2.0, None]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0}


def stats(arrival: float, admission: float, *emissions: tuple[float, int]) -> RequestStats:
    found = RequestStats(arrival_s=arrival, admission_s=admission)
    found.emissions += emissions
    return found


def test_finished_requests_alone_are_in_the_percentiles() -> None:
    finished = Finished()
    # TTFT 2, gaps 1 and 3 for 5 tokens after the first
    finished.add(stats(10.0, 11.0, (12.0, 1), (13.0, 2), (16.0, 3)), "length")
    finished.add(stats(0.0, 50.0, (99.0, 1)), "abort")
    finished.add(stats(0.0, 50.0, (99.0, 1)), "error")
    moment = Moment(EngineStats(num_prefill_tokens=30, prefill_s=2.0), {"num_used": 1}, None, 0.0)
    found = finished.metrics(moment, 2, 3)
    assert (found.num_finished, found.num_aborted, found.num_failed) == (1, 1, 1)
    assert (found.num_running, found.num_waiting) == (2, 3)
    assert found.queue_s["p50"] == 1.0
    assert found.ttft_s["p99"] == 2.0
    assert found.tpot_s["p90"] == pytest.approx(0.8)
    assert found.itl_s["p50"] == 2.0
    assert found.prefill_tokens_per_s == 15.0
    assert found.decode_tokens_per_s is None
    assert found.as_dict()["engine"]["num_prefill_tokens"] == 30


def test_requests_may_finish_while_the_figures_are_taken() -> None:
    finished = Finished()

    class Racing(RequestStats):
        @property
        def queue_s(self) -> float | None:
            finished.add(stats(0.0, 1.0), "length")  # as the stepping thread does
            return 5.0

    finished.add(Racing(), "length")
    finished.add(Racing(), "length")
    found = finished.metrics(Moment(EngineStats(), {}, None, 0.0), 0, 0)
    assert found.queue_s == {"p50": 5.0, "p90": 5.0, "p99": 5.0}


def test_counters_of_two_engines_add_up() -> None:
    assert both(EngineStats(num_steps=2, draft_s=0.5), EngineStats(num_steps=3, verify_s=1.0)) == EngineStats(
        num_steps=5, draft_s=0.5, verify_s=1.0
    )
