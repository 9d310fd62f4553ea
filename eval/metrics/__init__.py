"""Metrics as modules of the library `evaluate`: usable alone, as classes, and combined; see docs/metrics.md."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError

METRICS = {
    "acceptance_rate": "AcceptanceRate",
    "acceptance_length": "AcceptanceLength",
    "acceptance_per_position": "AcceptancePerPosition",
    "speedup": "Speedup",
    "exact_match_rate": "ExactMatchRate",
    "first_divergence": "FirstDivergence",
    "sample_distance": "SampleDistance",
    "logprob_distance": "LogprobDistance",
}  # folder -> class


def metric_path(name: str) -> str:
    """Return the folder of a metric, for `evaluate.load` and `evaluate.combine`.

    Raises:
        ConfigError: there is no such metric.
    """
    if name not in METRICS:
        raise ConfigError(f"metric {name!r} is unknown; available: {', '.join(METRICS)}")
    return str(Path(__file__).resolve().parent / name)


def __getattr__(name: str) -> Any:
    """Return a metric's class. Lazily: `evaluate` takes seconds to import, and the plain functions need none of it."""
    for folder, kind in METRICS.items():
        if kind == name:
            return getattr(import_module(f"specdec.eval.metrics.{folder}.{folder}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
