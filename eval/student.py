"""Student's t distribution, where few values say how much they scatter."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

_POINTS = 20001  # of the integral: five digits from 1 degree of freedom to a hundred thousand


@cache
def t_quantile(level: float, num_free: int) -> float:
    """Return the t that a value of Student's distribution exceeds in size with probability 1 - `level`.

    With t = sqrt(num_free) tan(a) its density is proportional to cos(a) ** (num_free - 1), on a finite interval.

    Args:
        level: above 0 and below 1.
        num_free: degrees of freedom, at least 1.
    """
    narrow = min(1.0, 12 / math.sqrt(num_free))  # behind that angle there is nothing
    angles = np.linspace(0.0, math.pi / 2 * narrow, _POINTS)
    density = np.cos(angles) ** (num_free - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(num_free) * math.tan(float(np.interp(level, below / below[-1], angles)))
