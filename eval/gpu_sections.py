"""Checks in sections with a time budget each: what was found, what failed, what did not begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, MEASURED, ABSENT = "passed", "FAILED", "measured", "not here"
NOT_RUN, NOT_TIMED = "NOT RUN", "not timed"  # for want of time: something was demanded of it, or not


class NotHere(Exception):
    """What is to be checked does not exist on this machine or for this model; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `good` None: something was measured, of which nothing is demanded."""

    good: bool | None
    detail: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check and its verdict."""

    section: str
    name: str
    verdict: str
    detail: str
    values: dict[str, Any]
    seconds: float


Check = tuple[str, Callable[[], Finding]]


@dataclass(slots=True)
class Clock:
    """The time all sections have together."""

    limit_s: float
    start: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.perf_counter() - self.start)


def run_section(
    name: str,
    checks: Iterable[Check],
    budget_s: float,
    clock: Clock,
    say: Callable[[str], object],
    late: str = NOT_RUN,
) -> list[Outcome]:
    """Run checks one after the other; those that would begin behind the budget or the clock's limit do not begin.

    Whatever a check raises, and whatever making the next one raises, is an outcome.

    Args:
        name: of the section.
        checks: names and what to call.
        budget_s: of the section.
        clock: of all sections.
        say: told each check's name before it begins.
        late: the verdict of those that do not begin.
    """
    begin = time.perf_counter()
    outcomes: list[Outcome] = []
    remaining = iter(checks)
    while True:
        start = time.perf_counter()
        try:
            check, call = next(remaining)
        except StopIteration:
            return outcomes
        except Exception as error:
            return [*outcomes, Outcome(name, "making its checks", FAILED, told(error), {}, 0.0)]
        if start - begin > budget_s or clock.left_s <= 0:
            over = f"the section's {budget_s:.0f} s" if clock.left_s > 0 else f"all {clock.limit_s:.0f} s"
            outcomes.append(Outcome(name, check, late, f"{over} were over", {}, 0.0))
            continue
        say(f"{name}: {check}")
        found = _run(call)
        outcomes.append(Outcome(name, check, *found, time.perf_counter() - start))


def told(error: Exception) -> str:
    """Return an error's kind and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _run(call: Callable[[], Finding]) -> tuple[str, str, dict[str, Any]]:
    try:
        found = call()
    except NotHere as reason:
        return ABSENT, str(reason), {}
    except Exception as error:  # whatever a kernel, a driver or a model raises is what this is looking for
        return FAILED, told(error), {}
    verdict = MEASURED if found.good is None else PASSED if found.good else FAILED
    return verdict, found.detail, found.values
