"""From logits to the distribution a token is drawn from; one function for target and drafters.

Filters run in transformers' order: temperature, top-k, top-p, min-p, with its kept sets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.interfaces import SamplingParams

log = logging.getLogger("specdec")
_SHIFT_BELOW = 1e-2  # temperatures under this divide differences to the maximum, so that nothing overflows
_MIN_TEMPERATURE = 1e-30  # already one-hot for any two different float32 logits of a real model


class _Filters(NamedTuple):
    """The part of SamplingParams that shapes a distribution; rows with equal filters are one call."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the distribution each row's token is drawn from.

    Args:
        logits: [R, V], any float dtype; cast to float32 first, as transformers does. -inf marks forbidden tokens.
        params: one per row; processors are not run here.

    Returns:
        [R, V] float32 rows that sum to 1; greedy rows are one-hot at the first largest logit.

    Raises:
        ValueError: `params` does not have one entry per row.
    """
    if logits.dim() != 2 or logits.shape[0] != len(params):
        raise ValueError(
            f"expected one SamplingParams per row of [R, V] logits, got {len(params)} for {tuple(logits.shape)}"
        )
    logits = logits.to(torch.float32)
    groups: dict[_Filters, list[int]] = {}
    for row, row_params in enumerate(params):
        groups.setdefault(_filters(row_params), []).append(row)
    if len(groups) == 1:
        return _distribution(logits, next(iter(groups)))
    result = torch.empty_like(logits)
    for filters, rows in groups.items():
        index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        result[index] = _distribution(logits[index], filters)
    return result


def apply_processors(logits_row: Tensor, ids: Tensor, processors: Iterable[Any]) -> Tensor:
    """Run context-dependent logits processors on one row.

    Args:
        logits_row: [1, V]; left as it is even by processors that write in place.
        ids: [1, n] int64, every token before the one being chosen.
        processors: transformers LogitsProcessors, called in order.

    Returns:
        [1, V] float32.
    """
    scores = logits_row.to(torch.float32, copy=True)
    for processor in processors:
        result = processor(ids, scores)
        if not isinstance(result, Tensor) or result.numel() != logits_row.numel():
            got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            name = getattr(processor, "name", type(processor).__name__)
            raise ConfigError(
                f"logits processor {name} returned {got}; allowed: a tensor of shape {tuple(logits_row.shape)}"
            )
        scores = result.reshape(logits_row.shape)
    return scores


def check_sampling(params: SamplingParams) -> None:
    """Refuse values that mean no distribution.

    Raises:
        ConfigError: a value is out of range or of the wrong type; the message says what is allowed.
    """
    _check_number("temperature", params.temperature, "a finite number >= 0 (0 is greedy)", lambda x: 0 <= x < math.inf)
    _check_number("top_p", params.top_p, "a number in (0, 1] (1 is off)", lambda x: 0 < x <= 1)
    _check_number("min_p", params.min_p, "a number in [0, 1] (0 is off)", lambda x: 0 <= x <= 1)
    if not _is_int(params.top_k) or params.top_k < 0:
        raise ConfigError(f"top_k must be an integer >= 0 (0 is off), got {params.top_k!r}")
    if params.seed is not None and not (_is_int(params.seed) and -(2**63) <= params.seed < 2**63):
        raise ConfigError(f"seed must be None or an integer in [-2**63, 2**63), got {params.seed!r}")


@cache
def warn_without_effect(setting: str, reason: str) -> None:
    """Say that a setting does nothing; the cache makes it once per process."""
    log.warning("%s: no effect %s", setting, reason)


def warn_ignored(params: SamplingParams) -> None:
    """Say which settings do nothing because temperature 0 is greedy."""
    default = SamplingParams()
    idle = [n for n in ("top_k", "top_p", "min_p", "seed") if getattr(params, n) != getattr(default, n)]
    if params.greedy and idle:
        warn_without_effect(", ".join(idle), "at temperature 0, which is greedy")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(name: str, value: Any, allowed: str, is_good: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not is_good(value):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


def _filters(params: SamplingParams) -> _Filters:
    if params.greedy:
        return _Filters(0.0, 0, 1.0, 0.0)
    return _Filters(params.temperature, params.top_k, params.top_p, params.min_p)


def filtered_scores(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return [R, V] float32 scores whose softmax is what a token is drawn from, as transformers' `scores`.

    Args:
        logits: [R, V], any float dtype, after processors.
        params: of all rows; greedy leaves the logits as they are.
    """
    logits = logits.to(torch.float32)
    if params.greedy:
        return logits
    scores, ids = _filtered(logits, _filters(params))
    return scores if ids is None else torch.full_like(logits, -torch.inf).scatter_(1, ids, scores)


def _distribution(logits: Tensor, filters: _Filters) -> Tensor:
    """Return [R, V] float32 probabilities of [R, V] float32 logits under one set of filters."""
    if filters.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    scores, ids = _filtered(logits, filters)
    probs = scores.softmax(dim=-1)
    return probs if ids is None else torch.zeros_like(logits).scatter_(1, ids, probs)


def _filtered(logits: Tensor, filters: _Filters) -> tuple[Tensor, Tensor | None]:
    """Return scores [R, n], -inf where filtered out, and the tokens [R, n] of their columns; None = all V in order."""
    scores, ids = _scale(logits, filters.temperature), None
    if 0 < filters.top_k < logits.shape[1]:
        scores, ids = _top_k(scores, filters.top_k)
    return _min_p(_top_p(scores, filters.top_p), filters.min_p), ids


def _scale(logits: Tensor, temperature: float) -> Tensor:
    if temperature >= _SHIFT_BELOW:
        return logits if temperature == 1.0 else logits / temperature
    return (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, _MIN_TEMPERATURE)


def _top_k(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the entries that are at least the k-th largest, all those tied with it included.

    Returns:
        scores [R, n] float32 with -inf in unused columns; ids [R, n] int64, the token of each column, increasing.
    """
    values, ids = scores.topk(top_k, dim=-1)
    smallest = values[:, -1:].clamp_min(torch.finfo(scores.dtype).min)  # -inf entries are never candidates
    width = int((scores >= smallest).sum(dim=-1).amax()) if scores.shape[0] else top_k
    if width > top_k:
        values, ids = scores.topk(width, dim=-1)
        values = values.masked_fill(values < smallest, -torch.inf)
    ids, order = ids.sort(dim=-1)
    return values.gather(1, order), ids


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    """Return `scores` with -inf where the mass of an entry and of everything below it is at most 1 - top_p.

    Only the values are sorted, not which token each belongs to: numpy's vectorised sort of a row is some thirty times
    faster than an argsort. Of equal values the first columns are kept.
    """
    if top_p >= 1.0:
        return scores
    probs = scores.softmax(dim=-1)
    ascending = _sorted(probs)
    from_here_down = ascending.cumsum(dim=-1, dtype=torch.float64).to(torch.float32)
    num_removed = (from_here_down <= 1.0 - top_p).sum(dim=-1, keepdim=True).clamp_max(scores.shape[1] - 1)
    smallest = ascending.gather(1, num_removed)  # of the kept ones
    removed = probs < smallest
    num_removed_ties = num_removed - removed.sum(dim=-1, keepdim=True)
    if bool((num_removed_ties > 0).any()):
        tied = probs == smallest
        num_kept_ties = tied.sum(dim=-1, keepdim=True) - num_removed_ties
        removed |= tied & (tied.cumsum(dim=-1) > num_kept_ties)
    return scores.masked_fill(removed, -torch.inf)


def _sorted(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1))
    return values.sort(dim=-1).values


def _min_p(scores: Tensor, min_p: float) -> Tensor:
    """Return `scores` with -inf where a probability is below `min_p` times the largest one of its row."""
    if min_p <= 0.0:
        return scores
    probs = scores.softmax(dim=-1)
    return scores.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
