"""When two tokens are so close that rounding may decide between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.trace import top_two

# Two logits this close are a tie to the arithmetic: float32 sums differ by about 1e-5 between kernels, and between
# logits of 16 to 32 half precision has steps of 1/64 (float16) and 1/8 (bfloat16), of which two are allowed.
NEAR_TIES = {torch.float64: 1e-8, torch.float32: 2e-4, torch.float16: 0.05, torch.bfloat16: 0.26}


def near_tie_limit(dtype: torch.dtype, given: float | None = None) -> float:
    """Return how close two logits of a model in `dtype` must be to be a near-tie; `given` stands if there is one.

    Raises:
        ConfigError: nothing is known about the dtype.
    """
    limit = NEAR_TIES.get(dtype) if given is None else given
    if limit is None:
        raise ConfigError(f"no near-tie is defined for {dtype}; say with near_tie= how close two logits may be")
    return limit


def top_gap(logits: Tensor) -> float:
    """Return best minus second-best of logits [V]."""
    return float(top_two(logits[None])[1][0])


def behind(scores: Tensor, token_ids: Sequence[int]) -> float:
    """Return how far the last of `token_ids` lies below the best of scores [V].

    This decides, not the gap of the two best: of three tied tokens the two that were taken need not be the first.
    """
    return float(scores.max() - scores[list(token_ids)].min())


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first index at which two answers differ, as far as both go, or None."""
    pairs = zip(expected, got, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)
