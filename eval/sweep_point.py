"""One point of a sweep, in whatever process: where it goes, what it is called, and what becomes of it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rich.console import Console

from specdec.errors import SpecdecError
from specdec.eval.point import UNMEASURED, is_finished, measure_point, measured_part, read_summary
from specdec.eval.point_run import quiet_libraries, samples_bar
from specdec.eval.summary import drafter_faults

log = logging.getLogger("specdec")

# Environment variables, of the process that began the sweep and of its children: what the grid is.
NUM_POINTS, SWEPT_KEYS = "SPECDEC_SWEEP_POINTS", "SPECDEC_SWEEP_KEYS"
_MOST_NAME, _MOST_VALUE, _DIGEST = 100, 24, 8  # characters


def run_sweep_point(config: Any) -> float | str:
    """Measure a point of a sweep into a folder of its own; return its score, or why it has none.

    What fails is said, `measure_point` writes it into the folder, and the rest of the sweep goes on.
    """
    quiet_libraries()
    settings = HydraConfig.get()
    words = list(settings.overrides.task)
    number, total = int(OmegaConf.select(settings, "job.num", default=0)) + 1, os.environ.get(NUM_POINTS, "?")
    root = Path(settings.runtime.output_dir)
    name = "point"
    try:
        overrides = parse_overrides(words)
        name = point_name(overrides, os.environ.get(SWEPT_KEYS, "").split())
        folder = folder_of(root, name, digest(config))
        before = is_finished(folder)
        with samples_bar(Console(stderr=True)) as bar:
            points = bar.add_task("points", total=int(total) if total.isdigit() else None, completed=number - 1)
            task = bar.add_task(name, total=None)
            records = measure_point(
                *(config, folder),
                name=name,
                overrides=overrides,
                progress=lambda done, of: bar.update(task, completed=done, total=of),
            )
            bar.update(points, completed=number)
    except Exception as error:
        shown = str(error) if isinstance(error, SpecdecError) else f"{type(error).__name__}: {error}"
        log.error("point %s of %s, %s: failed, the others go on: %s", number, total, name, shown)
        return f"failed: {shown}"
    score = score_of(read_summary(folder, records))
    log.info("point %s of %s, %s: %s%s", number, total, name, _said(score), ", measured before" if before else "")
    return score


def score_of(summary: dict[str, Any]) -> float | str:
    """Return the best median speedup of a point's drafting engines, or why none of them counts."""
    over = {s["variant"]: s["decode"] for s in summary["speedups"]}
    medians: list[float] = []
    reasons: list[str] = []
    for name, own in summary["variants"].items():
        if own["kind"] != "engine" or own["drafter"] == "none":
            continue
        faults = drafter_faults(own)
        if faults:
            reasons += [f"{name}: {fault}" for fault in faults]  # one that could not draft is not the fastest
        elif not own["lossless"]:
            reasons.append(f"{name} is lossy")
        elif over.get(name) is None:
            reasons.append(f"{name} decoded nothing that could be compared")
        else:
            medians.append(float(over[name]["median"]))
    return max(medians) if medians else "; ".join(reasons) or "nothing in it drafts"


def _said(score: float | str) -> str:
    return f"done ({score})" if isinstance(score, str) else f"{score:.2f}x"


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return what a job's overrides set, as dotted key -> value; Hydra's own keys and deletions left out."""
    found: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(words)):
        key = override.key_or_group
        if not override.is_delete() and key.partition(".")[0].partition("/")[0] != "hydra":
            value = override.value()
            plain = value is None or isinstance(value, int | float | str | list | dict)
            found[key] = value if plain else str(value)
    return found


def folder_of(root: Path, name: str, mark: str) -> Path:
    """Return a point's folder in a sweep's: the one that ends with its mark, whatever it is called."""
    found = sorted(path for path in root.glob(f"*-{mark}") if path.is_dir())
    return found[0] if found else root / f"{name}-{mark}"


def point_name(overrides: dict[str, Any], swept: Sequence[str] = ()) -> str:
    """Return a name for people, of the swept keys if they are known; `digest` keeps two apart that are called alike."""
    parts = []
    for key, value in overrides.items():
        if key not in UNMEASURED and (not swept or key in swept):
            text = Path(str(value)).name if "/" in str(value) else str(value)
            parts.append(f"{key.rpartition('.')[2]}={text[:_MOST_VALUE]}")
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))[:_MOST_NAME] or "point"


def digest(config: Any) -> str:
    """Return a few characters that differ between configs that measure different things."""
    text = json.dumps(measured_part(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
