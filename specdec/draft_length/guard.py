"""A policy at work in an engine: whatever it raises costs drafts, never a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec.draft_length import DraftLength
from specdec.scheduler import Work

if TYPE_CHECKING:
    from specdec.acceptance import Verdict

WarnOnce = Callable[[str, str], None]  # (kind, message)


def allot(policy: DraftLength, work: Sequence[Work], warn_once: WarnOnce) -> Sequence[Work]:
    """Return the step's work with the draft tokens each request gets; none if the policy raises or answers nonsense."""
    try:
        allotted = list(policy.allot(work))
        for w, given in zip(work, allotted, strict=True):
            if given.request is not w.request or not 0 <= given.max_draft_tokens <= w.max_draft_tokens:
                raise ValueError(f"{given.max_draft_tokens} draft tokens where {w.max_draft_tokens} are allowed")
    except Exception as error:
        _warn(policy, "allot", error, warn_once)
        return [replace(w, max_draft_tokens=0) for w in work]
    return allotted


def learn(
    policy: DraftLength, work: Sequence[Work], verdicts: Sequence[Verdict], draft_s: float, warn_once: WarnOnce
) -> None:
    """Tell a policy of a step that happened."""
    try:
        policy.learn(work, verdicts, draft_s)
    except Exception as error:
        _warn(policy, "learn", error, warn_once)


def release(policy: DraftLength, request_id: int, warn_once: WarnOnce) -> None:
    """Let a policy forget a request."""
    try:
        policy.release(request_id)
    except Exception as error:
        _warn(policy, "release", error, warn_once)


def _warn(policy: DraftLength, where: str, error: Exception, warn_once: WarnOnce) -> None:
    warn_once(
        f"draft_length.{where}",
        f"draft length {policy.name!r} raised {type(error).__name__} in {where}(): {error}; "
        + ("such a step drafts nothing" if where == "allot" else "the engine goes on without its knowing"),
    )
