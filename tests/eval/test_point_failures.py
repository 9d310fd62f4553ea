"""What a point that fails leaves: its error in a folder of its own, no word in anybody else's, and no memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from omegaconf import OmegaConf
from rich.console import Console

from specdec import SpecdecError
from specdec.eval import point, point_run, sweep_point
from specdec.eval.point import is_finished, measure_point
from specdec.eval.report.gather import gather
from specdec.eval.sweep_point import run_sweep_point, score_of
from tests.eval.known_model import config_for, save_known_model
from tests.eval.test_point import SMALL, Killed, stop_after


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def refused(config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what `run_point` says when it is to measure into a folder and may not."""
    settings = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(folder)))
    monkeypatch.setattr(point_run, "HydraConfig", SimpleNamespace(get=lambda: settings))
    with pytest.raises((SpecdecError, SystemExit)) as told:
        point_run.run_point(config, Console())
    return str(told.value)


def test_who_is_refused_leaves_no_error_in_a_folder_that_others_measure_into(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("acceptance", known, *SMALL)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, Killed())
        with pytest.raises(Killed):
            measure_point(config, tmp_path / "point")
    with FileLock(tmp_path / "point" / ".lock"):  # as if it went on
        said = refused(config, tmp_path / "point", monkeypatch)
    assert "being measured by another process" in said
    other = refused(config_for("acceptance", known, *SMALL, "repeats=3"), tmp_path / "point", monkeypatch)
    assert "holds another point" in other
    assert not (tmp_path / "point" / "error.json").exists()
    (begun,) = gather([tmp_path]).points
    assert len(begun.records.samples) == 1


def test_nor_does_a_sweep(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OmegaConf.create({"overrides": {"task": []}, "runtime": {"output_dir": str(tmp_path)}})
    monkeypatch.setattr(sweep_point, "HydraConfig", SimpleNamespace(get=lambda: settings))
    config = config_for("sweep", known, *SMALL)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, Killed())
        with pytest.raises(Killed):
            run_sweep_point(config)
    (folder,) = tmp_path.iterdir()
    with FileLock(folder / ".lock"):
        assert "being measured by another process" in str(run_sweep_point(config))
    assert not (folder / "error.json").exists()
    assert isinstance(run_sweep_point(config), float)


def test_an_error_is_left_in_the_folder_until_the_point_is_tried_again(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("acceptance", known, *SMALL)
    error = tmp_path / "error.json"
    with monkeypatch.context() as patch:
        stop_after(patch, 2, full())
        with pytest.raises(SpecdecError):
            measure_point(config, tmp_path)
    assert "No space left" in json.loads(error.read_text())["message"]
    with monkeypatch.context() as patch:
        stop_after(patch, 2, Killed())
        with pytest.raises(Killed):
            measure_point(config, tmp_path)
    assert not error.exists(), "what is being measured has not failed"
    measure_point(config, tmp_path)
    assert is_finished(tmp_path) and not error.exists()


def test_the_engines_of_a_failed_point_are_gone_before_the_next_has_its_own(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("acceptance", known, *SMALL)
    built: list[weakref.ref[Any]] = []
    alive: list[int] = []
    build = point.build_variants

    def watched(*arguments: Any) -> Any:
        alive.append(sum(engine() is not None for engine in built))
        found = build(*arguments)
        built.extend(weakref.ref(variant.llm.engine) for variant in found.found)
        return found

    monkeypatch.setattr(point, "build_variants", watched)
    gc.disable()  # else it might run by chance
    try:
        with monkeypatch.context() as patch:
            stop_after(patch, 2, full())
            with contextlib.suppress(SpecdecError):
                measure_point(config, tmp_path / "failed")
        measure_point(config, tmp_path / "next")
        measure_point(config, tmp_path / "last")
    finally:
        gc.enable()
    assert len(built) == 6
    assert alive == [0, 0, 0]


@pytest.mark.parametrize(
    ("rule", "temperature", "lossless"),
    [("typical", 0, True), ("relaxed", 0, True), ("typical", 1, False), ("relaxed", 1, False), ("synthetic", 0, False)],
)
def test_lossy_rules_are_lossless_where_they_match_exactly(
    known: Path, tmp_path: Path, rule: str, temperature: int, lossless: bool
) -> None:
    settings = ["drafter=ngram", f"verifier={rule}", f"temperature={temperature}", "seed=1"]
    measure_point(config_for("acceptance", known, *SMALL, *settings), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["variants"]["ngram"]["lossless"] is lossless
    score = score_of(summary)
    assert isinstance(score, float) if lossless else score == "ngram is lossy"


def test_an_engine_that_drafts_nothing_has_no_speedup(known: Path, tmp_path: Path) -> None:
    beside = "+beside.cached={drafter: none, prefix_caching: true}"
    measure_point(config_for("acceptance", known, *SMALL, "drafter=none", beside), tmp_path / "one")
    assert score_of(json.loads((tmp_path / "one" / "summary.json").read_text())) == "nothing in it drafts"
    measure_point(config_for("acceptance", known, *SMALL, "max_new_tokens=30", beside), tmp_path / "two")
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    (scripted,) = (s["decode"]["median"] for s in summary["speedups"] if s["variant"] == "scripted")
    assert score_of(summary) == scripted
    for s in summary["speedups"]:
        if s["variant"] == "cached":
            s["decode"]["median"] = 9.0
    assert score_of(summary) == scripted
