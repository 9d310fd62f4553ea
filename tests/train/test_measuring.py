"""What a trained drafter is measured as, and what its picture marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.engine_config import DEFAULT_DRAFT_TOKENS
from specdec.train.jobs import steps_join_at
from specdec.train.measuring import CHAIN_TOKENS, MeasureConfig, ways
from specdec.train.plot import plot_curve


def test_the_chain_of_the_engine() -> None:
    assert CHAIN_TOKENS == DEFAULT_DRAFT_TOKENS


@pytest.mark.parametrize(
    ("method", "settings", "trees", "served"),
    [
        ("eagle3", {}, True, []),
        ("eagle3", {"tree": "chain", "max_draft_tokens": 2}, True, ["chain of 2"]),
        ("eagle3", {"tree": "dynamic"}, True, ["tree dynamic of at most 16"]),
        ("eagle3", {"tree": "dynamic"}, False, []),
        ("medusa", {}, True, ["tree medusa of at most 16"]),
        ("medusa", {"tree": [2, 1], "max_draft_tokens": 4}, True, ["tree [2, 1] of at most 4"]),
        ("medusa", {"tree": "chain"}, True, []),
    ],
)
def test_what_is_served_is_measured(method: str, settings: dict[str, Any], trees: bool, served: list[str]) -> None:
    found = ways(method, settings, MeasureConfig(), trees)
    assert [way.name for way in found] == ["none", f"{method}, chain of 4", *(f"{method}, {name}" for name in served)]
    assert all(way.options == {} and way.max_draft_tokens is None for way in found[2:])


def test_where_the_loss_jumps(tmp_path: Path) -> None:
    assert steps_join_at("eagle3", {"first_share": 0.4, "steps": 4}, 1000) == {400: "1 -> 4 draft tokens"}
    assert steps_join_at("eagle3", {"first_share": 0.4, "steps": 1}, 1000) == {}
    assert steps_join_at("eagle3", {}, 1000) == steps_join_at("medusa", {}, 1000) == {}
    curve = [{"num_tokens": n, "seconds": 1.0, "loss": 2.0} for n in (100, 900)]
    pictures = [tmp_path / "plain.png", tmp_path / "marked.png"]
    for path, marks in zip(pictures, (None, {400: "1 -> 4 draft tokens"}), strict=True):
        plot_curve(curve, path, "a curve", marks)
    assert pictures[0].read_bytes() != pictures[1].read_bytes()
