"""Every shipped experiment has enough prompts of the shipped set for the intervals that its answer needs."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from specdec.eval.ratios import num_needed

FOLDER = Path(__file__).resolve().parents[2] / "configs/experiment"
ALL = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}
LIMITED = {name: found for name, found in ALL.items() if found.get("prompts", {}).get("limit")}


@pytest.mark.parametrize("name", sorted(LIMITED))
def test_every_size_has_as_many_full_batches_as_the_controls_interval_takes(name: str) -> None:
    found = LIMITED[name]
    swept = str(found.get("hydra", {}).get("sweeper", {}).get("params", {}).get("batch_size", 1))
    num_prompts = found["prompts"]["limit"]
    shipped = files("specdec.eval").joinpath("data/small_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert num_prompts <= len(shipped)
    for size in map(int, swept.split(",")):
        assert num_prompts // size >= num_needed(0.99), size
