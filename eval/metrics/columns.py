"""What all metrics share: the names of inputs and options, intervals, and answers up to their end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from specdec.errors import ConfigError, InputError
from specdec.eval.ratios import micro_interval, share_interval
from specdec.registry import refuse_unknown

INPUTS = {
    *("steps", "predictions", "references"),
    *("prompts", "baseline_s", "baseline_tokens", "variant_s", "variant_tokens"),
    *("predicted_samples", "reference_samples", "predicted_logprobs", "reference_logprobs"),
}
OPTIONS = {"level", "cut", "eos_token_id", "num_tokens"}


def ignore_others(metric: str, others: Collection[str]) -> None:
    """Accept what belongs to another metric and nothing else: `evaluate.combine` hands everything to each.

    Raises:
        ConfigError: no metric of ours has an input or option of that name.
    """
    refuse_unknown(f"metric {metric}", others, INPUTS | OPTIONS)


def check_level(level: float) -> float:
    """Return the level of an interval.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise ConfigError(f"level={level!r}; allowed: above 0 and below 1, such as 0.95")
    return float(level)


def with_interval(name: str, value: float | None, pairs: Iterable[tuple[float, float]], level: float) -> dict[str, Any]:
    """Return a sum over a sum under `name`, with the ends of its interval; None of few rows.

    Args:
        name: of the figure.
        value: the figure.
        pairs: what it sums, [(above, below), ...]; those with nothing below are left out.
        level: of the interval.
    """
    counted = [pair for pair in pairs if pair[1]]
    low, high = micro_interval(counted, check_level(level)) or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def share_with_interval(name: str, count: int, total: int, level: float) -> dict[str, Any]:
    """Return which share of rows has something under `name`, with the ends of its interval; None of no rows.

    Args:
        name: of the figure.
        count: rows that have it.
        total: all rows.
        level: of the interval.
    """
    low, high = share_interval(count, total, check_level(level)) or (None, None)
    return {name: count / total if total else None, f"{name}_low": low, f"{name}_high": high}


def until_eos(token_ids: Sequence[int], eos_token_id: int | Sequence[int] | None) -> list[int]:
    """Return an answer up to its first EOS token, that included: what comes behind is no part of it.

    Raises:
        ConfigError: eos_token_id is neither an id nor several.
    """
    if eos_token_id is None:
        return list(token_ids)
    ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    if any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
        raise ConfigError(f"eos_token_id={eos_token_id!r}; allowed: a token id or a list of those")
    at = next((i for i, token in enumerate(token_ids) if token in ends), len(token_ids))
    return list(token_ids[: at + 1])


def check_equal_lengths(columns: Mapping[str, Sequence[Any]]) -> None:
    """Raise InputError unless all have as many rows.

    Raises:
        InputError: they do not.
    """
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"the inputs have unequal numbers of rows: {lengths}; give one of each per row")
