"""t(M) of one target on one machine: timed once, kept in the user's cache directory, then frozen."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec.errors import ModelLoadError
from specdec.models.cache_dir import atomic_write_json, dir_lock, ensure_cache_dir
from specdec.models.machine import step_seconds
from specdec.models.matmul import cpu_name
from specdec.models.progress import report
from specdec.models.runner import ModelRunner, Program

log = logging.getLogger("specdec")

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
FEW_ROWS = (1, 2, 4, 8, 16, 32)
_CONTEXT_TOKENS = 128
_SLOW_S, _VERY_SLOW_S = 0.2, 1.0  # forwards of one row from which on less is timed
# Says where a checkpoint came from, not what its forward costs.
_NAMES = ("_name_or_path", "transformers_version", "architectures")

_KNOWN: weakref.WeakKeyDictionary[Program, dict[tuple[int, str], StepTimes]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a forward by its rows: increasing `rows`, and `seconds` that never decrease."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert _is_sound(self.rows, self.seconds), f"no step times: {self.rows}, {self.seconds}"

    def at(self, rows: int) -> float:
        """Return the seconds of a forward of `rows` >= 1 rows: linear between what was timed, and on behind it.

        Behind the last point the slope is that of the last doubling, in which arithmetic and not noise decides.
        """
        if rows >= self.rows[-1]:
            half = max(i for i, r in enumerate(self.rows[:-1]) if i == 0 or 2 * r <= self.rows[-1])
            return self._line(half, len(self.rows) - 1, rows)
        after = next(i for i, r in enumerate(self.rows) if r > rows)
        return self._line(after - 1, after, rows)

    def _line(self, i: int, j: int, rows: int) -> float:
        slope = (self.seconds[j] - self.seconds[i]) / (self.rows[j] - self.rows[i])
        return self.seconds[j] + slope * (rows - self.rows[j])


def _is_sound(rows: Sequence[int], seconds: Sequence[float]) -> bool:
    return (
        len(rows) == len(seconds) >= 2
        and list(rows) == sorted(set(rows))
        and rows[0] == 1
        and list(seconds) == sorted(seconds)
        and seconds[0] > 0
        and seconds[-1] < math.inf
    )


def smooth(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the nearest sequence (least squares) that never decreases: more rows never take less time but by noise.

    Source: pool adjacent violators, Ayer et al. 1955, Annals of Mathematical Statistics 26(4).
    """
    pools: list[list[float]] = []
    for value in seconds:
        pools.append([value])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return tuple(statistics.fmean(pool) for pool in pools for _ in pool)


def step_times(runner: ModelRunner) -> StepTimes:
    """Return t(M) of a runner's program: from memory, from the cache directory, or timed now, which takes seconds."""
    key = (torch.get_num_threads(), str(_reading(runner)))
    known = _KNOWN.setdefault(runner.program, {})
    if key not in known:
        known[key] = _kept_or_measured(runner)
    return known[key]


def _reading(runner: ModelRunner) -> dict[str, str]:
    """Return how keys and values are read, where it is not as they are and by torch's attention."""
    codec, backend = runner.cache.codec, runner.cache.backend
    found = {} if codec is None else {"kv_dtype": codec.name}
    return found if backend is None else {**found, "attention": f"flash-attn {backend.version}"}


def identity(runner: ModelRunner) -> dict[str, Any]:
    """Return all that t(M) depends on: model, dtypes, program, kernels, machine, threads and versions."""
    weights: dict[str, int] = {}
    for parameter in [] if runner.model is None else runner.model.parameters():
        kind = str(parameter.dtype)
        weights[kind] = weights.get(kind, 0) + parameter.numel()
    config = {k: v for k, v in runner.config.to_dict().items() if k not in _NAMES}
    is_cuda = runner.device.type == "cuda"
    return {
        "config": json.loads(json.dumps(config, sort_keys=True, default=str)),
        "dtype": str(runner.dtype),
        "weights": weights,
        "program": type(runner.program).__name__,
        "prepacked_bytes": runner.extra_weight_bytes,
        "device": torch.cuda.get_device_name(runner.device) if is_cuda else f"{runner.device.type} {cpu_name()}",
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": [*ROWS],
        **_reading(runner),
    }


def _kept_or_measured(runner: ModelRunner) -> StepTimes:
    what = identity(runner)
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    kept = None
    try:
        path = ensure_cache_dir() / f"step-times-{digest}.json"
        with dir_lock(path):  # two processes that time at once disturb each other
            kept = _read(path)
            if kept is None:
                kept = _measure(runner)
                atomic_write_json(path, {"of": what, "rows": [*kept.rows], "seconds": [*kept.seconds]})
    except (OSError, ModelLoadError) as error:
        log.warning("the target's step times could not be kept: %s", error)
    return kept or _measure(runner)


def _read(path: Path) -> StepTimes | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        rows, seconds = tuple(map(int, stored["rows"])), tuple(map(float, stored["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None  # absent, unreadable or damaged: measured again
    return StepTimes(rows, seconds) if _is_sound(rows, seconds) else None


def _measure(runner: ModelRunner) -> StepTimes:
    own = runner.with_own_cache()
    own.cache.max_bytes = None  # the table is the model's, whatever limit the first who asks has; it takes 256 tokens
    most = runner.max_positions or 1 << 30
    rows = [r for r in ROWS if r <= max(2, most // 2)]
    context = max(1, min(_CONTEXT_TOKENS, most - rows[-1]))
    what = f"timing the target's forward with 1 to {rows[-1]} rows, once for this model and machine"
    report(what, 0, 1)
    first_s = step_seconds(own, [1], context=context, repeats=1)[0]
    repeats = 11 if first_s < _SLOW_S else 3
    if first_s > _VERY_SLOW_S:
        rows, repeats = [r for r in rows if r in FEW_ROWS], 1
    seconds = step_seconds(own, rows, context=context, repeats=repeats)
    report(what, 1, 1)
    return StepTimes(tuple(rows), smooth(seconds))
