"""A drafter that could not draft is told wherever its figures are, and wins nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.drafters.ngram import NgramDrafter
from specdec.errors import OutOfCacheError
from specdec.eval.point import measure_point
from specdec.eval.point_view import show_point
from specdec.eval.records import read_records
from specdec.eval.report.gather import gather
from specdec.eval.summary import summarise
from specdec.eval.sweep_point import score_of
from tests.eval.known_model import config_for, save_known_model
from tests.eval.test_point import SMALL


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


class Built(NgramDrafter):
    @classmethod
    def build(cls, context: Any) -> Any:
        return cls(3, 1)


class FailingDrafter(Built):
    def propose(self, requests: Any, noise: Any) -> Any:
        raise RuntimeError("nothing to say")


class StarvedDrafter(Built):
    def propose(self, requests: Any, noise: Any) -> Any:
        raise OutOfCacheError("no room for drafts")


class InvalidDrafter(Built):
    def propose(self, requests: Any, noise: Any) -> Any:
        tree = super().propose(requests, noise)
        return replace(tree, token_ids=tree.token_ids + 10**6)


@pytest.mark.parametrize(
    ("drafter", "count", "said"),
    [
        (FailingDrafter, "num_drafter_errors", "its drafter FAILED in"),
        (StarvedDrafter, "num_missed_drafts", "its drafter had no KV MEMORY in"),
        (InvalidDrafter, "num_rejected_drafts", "its drafter's proposals were INVALID in"),
    ],
)
def test_it_is_counted_told_and_has_no_score(
    known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: type, count: str, said: str
) -> None:
    config = config_for("acceptance", known, *SMALL, "drafter=ngram", f"drafter.name={__name__}:{drafter.__name__}")
    records = measure_point(config, tmp_path)
    name = records.header.variants[1].name
    own = [request for sample in records.of(name) for request in sample.requests]
    for counted in ("num_drafter_errors", "num_missed_drafts", "num_rejected_drafts"):
        assert all((getattr(request, counted) > 0) == (counted == count) for request in own)
        assert not any(getattr(request, counted) for sample in records.of("none") for request in sample.requests)
    summary = summarise(records)
    assert summary["variants"][name][count] == sum(getattr(request, count) for request in own)
    show_point(records, summary, Console(width=200))
    assert f"{name}: {said} {summary['variants'][name][count]} " in capsys.readouterr().out
    assert any(said in warning for warning in gather([tmp_path]).warnings)
    score = score_of(summary)
    assert isinstance(score, str)
    assert said in score


def test_records_and_figures_of_earlier_releases_count_nothing(known: Path, tmp_path: Path) -> None:
    records = measure_point(config_for("acceptance", known, *SMALL), tmp_path)
    path, lines = tmp_path / "records.jsonl", []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        for request in entry.get("requests", []):
            del request["num_missed_drafts"], request["num_rejected_drafts"]
        lines.append(json.dumps(entry))
    path.write_text("\n".join(lines) + "\n")
    assert read_records(path) == records
    summary = summarise(records)
    for own in summary["variants"].values():
        del own["num_missed_drafts"], own["num_rejected_drafts"]
    assert isinstance(score_of(summary), float)
