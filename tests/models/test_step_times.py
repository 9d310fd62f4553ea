"""t(M): smoothing, interpolation, measuring once, keeping, and what a damaged file does."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specdec.models import step_times as module
from specdec.models.runner import ModelRunner
from specdec.models.step_times import StepTimes, identity, smooth, step_times
from tests.decoding import private_runner
from tests.models.architectures import model_of, named


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelRunner:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_KNOWN", {})
    return private_runner(model_of(named("llama")))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Replace the clock by a formula and note what was asked."""
    asked: list[list[int]] = []

    def measure(runner: Any, rows: list[int], *, context: int, repeats: int) -> list[float]:
        asked.append(rows)
        return [0.01 + 0.001 * r for r in rows]

    monkeypatch.setattr(module, "step_seconds", measure)
    return asked


def test_smoothing_never_decreases_and_leaves_what_does_not() -> None:
    assert smooth([1.0, 2.0, 2.0, 5.0]) == (1.0, 2.0, 2.0, 5.0)
    assert smooth([3.0, 1.0, 2.0, 4.0]) == (2.0, 2.0, 2.0, 4.0)
    assert smooth([1.0, 5.0, 4.0, 3.0, 6.0]) == (1.0, 4.0, 4.0, 4.0, 6.0)


def test_linear_between_and_on_behind() -> None:
    times = StepTimes((1, 2, 4, 8, 16), (1.0, 1.0, 2.0, 2.0, 4.0))
    assert [times.at(m) for m in (1, 2, 3, 4, 6, 8, 12, 16)] == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 3.0, 4.0]
    assert times.at(32) == pytest.approx(8.0)
    flat_end = StepTimes((1, 8, 12, 16), (1.0, 2.0, 4.0, 4.0))
    assert flat_end.at(24) == pytest.approx(6.0), "from 8 to 16, not from 12 to 16"
    assert StepTimes((1, 2), (1.0, 1.5)).at(4) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((1,), (1.0,)), ((2, 3), (1.0, 1.0)), ((1, 2), (2.0, 1.0)), ((1, 2), (0.0, 1.0)), ((1, 2), (1.0, float("nan")))],
)
def test_no_step_times(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError, match="no step times"):
        StepTimes(rows, seconds)


def test_it_is_measured_once_and_kept(
    runner: ModelRunner,
    measured: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "specdec"):
        first = step_times(runner)
    assert [r.message for r in caplog.records if "timing" in r.message] == [
        f"timing the target's forward with 1 to {first.rows[-1]} rows, once for this model and machine"
    ]
    calls = len(measured)
    assert step_times(runner.with_own_cache()) is first
    monkeypatch.setattr(module, "_KNOWN", {})  # another process
    assert step_times(runner) == first
    assert len(measured) == calls
    (path,) = tmp_path.glob("step-times-*.json")
    assert json.loads(path.read_text())["of"]["num_threads"] == identity(runner)["num_threads"]


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "{}", '{"rows": [1, 2], "seconds": [1]}', '{"rows": [1, 2], "seconds": [2, 1]}', '{"rows": 3}'],
)
def test_a_damaged_file_is_measured_again(
    damage: str, runner: ModelRunner, measured: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = step_times(runner)
    calls = len(measured)
    (path,) = tmp_path.glob("step-times-*.json")
    path.write_text(damage)
    monkeypatch.setattr(module, "_KNOWN", {})
    assert step_times(runner) == first
    assert len(measured) == 2 * calls
    assert json.loads(path.read_text())["rows"] == list(first.rows)


def test_without_a_cache_directory_it_is_not_kept(
    runner: ModelRunner,
    measured: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "no"))
    assert step_times(runner).at(1) == pytest.approx(0.011)
    assert "could not be kept" in caplog.text
    calls = len(measured)
    step_times(runner)
    assert len(measured) == calls, "remembered in the process"


def test_another_model_or_program_is_another_table(runner: ModelRunner) -> None:
    other = private_runner(model_of(named("llama")), lean=False)
    assert identity(runner) == identity(runner.with_own_cache())
    assert identity(other) != identity(runner)
    assert identity(private_runner(model_of(named("qwen2")))) != identity(runner)


def test_rows_fit_the_models_positions(runner: ModelRunner, measured: list[list[int]]) -> None:
    limit = runner.max_positions
    assert limit is not None
    assert max(step_times(runner).rows) <= max(2, limit // 2)


@pytest.mark.parametrize("tokens", [0, 32])
def test_a_memory_limit_is_not_in_the_table(tokens: int, runner: ModelRunner, measured: list[list[int]]) -> None:
    """The table is kept for runs without one, too."""
    limited = runner.with_own_cache()
    limited.cache.max_bytes = tokens * runner.cache.bytes_per_token
    assert step_times(limited) is step_times(runner)
    most = runner.max_positions or 0
    assert measured[-1] == [r for r in module.ROWS if r <= most // 2]
    assert limited.cache.max_bytes == tokens * runner.cache.bytes_per_token


def test_it_is_timed_within_a_memory_limit_of_nothing(runner: ModelRunner) -> None:
    runner.cache.max_bytes = 0
    assert step_times(runner).at(1) > 0


def test_slow_models_are_timed_less(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    for t1 in (0.1, 0.5, 2.0):

        def measure(_: Any, rows: list[int], *, context: int, repeats: int, t1: float = t1) -> list[float]:
            asked[t1] = (len(rows), repeats)
            return [t1 for _ in rows]

        monkeypatch.setattr(module, "step_seconds", measure)
        module._measure(runner)
    forwards = [rows * repeats for rows, repeats in asked.values()]
    assert forwards == sorted(forwards, reverse=True)
    assert forwards[-1] <= 6


def test_the_real_clock(runner: ModelRunner) -> None:
    times = step_times(runner)
    assert times.at(1) > 0
    assert times.at(1000) >= times.at(1)
    assert not runner.cache.is_open(-2)
