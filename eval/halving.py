"""Successive halving: of many settings all are tried on little, and the better ones on more.

Source: Jamieson and Talwalkar 2016, arXiv 1502.07943, algorithm 1.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins

from specdec.errors import ConfigError

_FEWEST = 2
Job = tuple[str, ...]  # one job's overrides


def register() -> None:
    """Let Hydra find the sweeper `successive_halving`, which it looks for in a package of its own name only."""
    folder = str(Path(__file__).parent / "plugins")
    if folder not in sys.path:
        sys.path.append(folder)
    Plugins.instance().register(importlib.import_module("hydra_plugins.specdec_halving").SuccessiveHalving)


def check_rounds(rungs: Any, keep: Any) -> None:
    """Raise ConfigError unless the rounds grow and each keeps a part of the settings."""
    are_numbers = isinstance(rungs, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in rungs)
    if not are_numbers or not rungs or rungs[0] < 1 or any(a >= b for a, b in itertools.pairwise(rungs)):
        raise ConfigError(f"hydra.sweeper.rungs={rungs}; allowed: numbers of prompts that grow, such as [4,12,24]")
    if not isinstance(keep, int | float) or not 0 < keep < 1:
        raise ConfigError(f"hydra.sweeper.keep={keep}; allowed: a share between 0 and 1")


def ranking(scores: dict[Job, float | None]) -> list[Job]:
    """Return the jobs that did not fail, the fastest first."""
    return sorted((job for job, score in scores.items() if score is not None), key=lambda job: -(scores[job] or 0.0))


def survivors(scores: dict[Job, float | None], keep: float) -> list[Job]:
    """Return the jobs that go on to the next round, at least two: on few prompts the first places are noise.

    Raises:
        ConfigError: all have failed.
    """
    ranked = ranking(scores)
    if not ranked:
        raise ConfigError("every setting failed in this round; their folders say why")
    return ranked[: max(_FEWEST, math.ceil(keep * len(ranked)))]
