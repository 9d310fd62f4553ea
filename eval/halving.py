"""Successive halving: of many settings all are tried on little, and the better ones on more.

Source: Jamieson and Talwalkar 2016, arXiv 1502.07943, algorithm 1.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins

from specdec.errors import ConfigError, SpecdecError

_FEWEST = 2
_REASONS_SHOWN = 3
Job = tuple[str, ...]  # one job's overrides
Outcome = float | str  # of a job: its score, or why it has none


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
        raise ConfigError(f"hydra.sweeper.rungs={rungs}; allowed: numbers of prompts that grow, such as [6,13,26]")
    if not isinstance(keep, int | float) or not 0 < keep < 1:
        raise ConfigError(f"hydra.sweeper.keep={keep}; allowed: a share between 0 and 1")


def ranking(outcomes: Mapping[Job, Outcome]) -> dict[Job, float]:
    """Return the scores of the jobs that have one, the fastest first.

    Raises:
        SpecdecError: none has; the message says why.
    """
    scores = {job: outcome for job, outcome in outcomes.items() if isinstance(outcome, float)}
    if not scores:
        reasons = Counter(map(str, outcomes.values())).most_common()
        shown = [f"{count} x {reason}" for reason, count in reasons[:_REASONS_SHOWN]]
        rest = [f"and {len(reasons) - _REASONS_SHOWN} other reasons"] if len(reasons) > _REASONS_SHOWN else []
        raise SpecdecError(f"none of {len(outcomes)} settings has a score to compare: {'; '.join([*shown, *rest])}")
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def survivors(outcomes: Mapping[Job, Outcome], keep: float) -> list[Job]:
    """Return the jobs that go on to the next round, at least two: on few prompts the first places are noise.

    Raises:
        SpecdecError: none has a score.
    """
    ranked = list(ranking(outcomes))
    return ranked[: max(_FEWEST, math.ceil(keep * len(ranked)))]
