"""How many tokens are drafted: always the same, until the drafter is unsure, or as many as pay. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from specdec.draft_length.cost_aware import CostAwareLength, StepTimes
from specdec.errors import ConfigError
from specdec.scheduler import Work

if TYPE_CHECKING:
    from specdec.acceptance import Verdict

__all__ = [
    "DRAFT_LENGTHS",
    "ConfidenceLength",
    "CostAwareLength",
    "DraftLength",
    "StaticLength",
    "StepTimes",
    "build_draft_length",
    "check_draft_length",
]

DRAFT_LENGTHS = ("static", "confidence", "cost_aware")


class DraftLength(Protocol):
    """A policy. The scheduler's `max_draft_tokens` is the cap; a policy only lowers it."""

    name: str
    min_confidence: float  # see `DraftRequest.min_confidence`
    remembers: bool  # what one request's drafts came to decides on another's

    def allot(self, work: Sequence[Work]) -> Sequence[Work]:
        """Return the step's work with the draft tokens each request gets."""
        ...

    def learn(self, work: Sequence[Work], verdicts: Sequence[Verdict], draft_s: float) -> None:
        """Hear of a step that happened: what was allotted, what came of it, and the seconds in the drafter."""
        ...

    def release(self, request_id: int) -> None:
        """Forget a request."""
        ...

    def reset(self) -> None:
        """Forget everything learned from past requests."""
        ...


class StaticLength:
    """The cap, in every step."""

    name = "static"
    min_confidence = 0.0
    remembers = False

    def allot(self, work: Sequence[Work]) -> Sequence[Work]:
        return work

    def learn(self, work: Sequence[Work], verdicts: Sequence[Verdict], draft_s: float) -> None: ...

    def release(self, request_id: int) -> None: ...

    def reset(self) -> None: ...


class ConfidenceLength(StaticLength):
    """The cap, or up to the first token the drafter itself gives less than `threshold`; that token stays.

    Only drafters that draw a chain token by token from a model stop; to others it is the static length.

    Source: the assistant's confidence threshold of transformers' dynamic speculation, Mamou et al. 2024,
    arXiv 2405.04304; there 0.4 too.
    """

    name = "confidence"

    def __init__(self, threshold: float) -> None:
        self.min_confidence = threshold


def check_draft_length(name: str, confidence_threshold: float) -> None:
    """Raise ConfigError unless `name` is a policy and the threshold a probability."""
    if name not in DRAFT_LENGTHS:
        close = difflib.get_close_matches(str(name), DRAFT_LENGTHS, n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"draft_length={name!r};{hint} allowed: {', '.join(DRAFT_LENGTHS)}")
    is_number = isinstance(confidence_threshold, int | float) and not isinstance(confidence_threshold, bool)
    if not is_number or not 0.0 <= confidence_threshold <= 1.0:
        raise ConfigError(f"confidence_threshold={confidence_threshold!r}; allowed: a probability, 0 to 1")


def build_draft_length(
    name: str, *, step_times: Callable[[], StepTimes], confidence_threshold: float = 0.4
) -> DraftLength:
    """Return a policy by name.

    Args:
        name: "static", "confidence" or "cost_aware".
        step_times: gives t(M) of the target; called for "cost_aware" only, since it may have to measure.
        confidence_threshold: of "confidence".

    Raises:
        ConfigError: the name is unknown, or the threshold no probability.
    """
    check_draft_length(name, confidence_threshold)
    if name == "cost_aware":
        return CostAwareLength(step_times())
    return StaticLength() if name == "static" else ConfidenceLength(confidence_threshold)
