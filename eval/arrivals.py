"""When requests come, what they ask for and whether their callers go away: seeded, so it can be done again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specdec.errors import ConfigError, InputError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load."""

    at_s: float  # after the load began
    prompt: int  # its number in the prompt set
    prompt_token_ids: Sequence[int]
    seed: int
    abort_after_tokens: int | None = None  # the caller goes away then; 0 = one step after it came. None = it stays


def poisson(rate: float, source: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process of `rate` per second: gaps are exponential, so bursts occur."""
    at = 0.0
    while True:
        at += source.expovariate(rate)
        yield at


def constant(rate: float, source: random.Random) -> Iterator[float]:
    """Yield times that are 1 / rate apart, beginning at 0."""
    count = 0
    while True:
        yield count / rate
        count += 1


def burst(rate: float, source: random.Random) -> Iterator[float]:
    """Yield 0 for ever: all at once."""
    while True:
        yield 0.0


PROCESSES: dict[str, Callable[[float, random.Random], Iterator[float]]] = {
    "poisson": poisson,
    "constant": constant,
    "burst": burst,
}


def arrivals(
    prompts: Sequence[Sequence[int]],
    *,
    process: str,
    rate: float,
    num_requests: int | None,
    duration_s: float | None,
    abort_share: float,
    max_new_tokens: int,
    seed: int,
) -> Iterator[Arrival]:
    """Yield requests in the order they come, the prompts in a shuffled order that is gone through again and again.

    Args:
        prompts: token ids of each.
        process: of `PROCESSES`.
        rate: requests per second on average.
        num_requests: how many, or None for as many as come in `duration_s`.
        duration_s: nothing comes from then on, or None.
        abort_share: this share goes away after 0 to max_new_tokens - 1 tokens.
        max_new_tokens: of each.
        seed: of everything that is drawn.

    Raises:
        ConfigError: neither a number nor a duration is given, or all come at once without a number.
        InputError: there are no prompts.
    """
    if num_requests is None and (duration_s is None or process == "burst"):
        raise ConfigError(
            f"num_requests={num_requests}, duration_s={duration_s}, arrivals={process!r}; allowed: a number, or a "
            "duration of a process that takes time (poisson, constant)"
        )
    if not prompts:
        raise InputError("the load has no prompts; give at least one")
    return _drawn(
        prompts,
        # Streams of their own: another share of aborts leaves the times and the prompts as they were.
        PROCESSES[process](rate, random.Random(f"{seed} times")),
        num_requests,
        duration_s,
        abort_share,
        max_new_tokens,
        seed,
    )


def _drawn(
    prompts: Sequence[Sequence[int]],
    times: Iterator[float],
    num_requests: int | None,
    duration_s: float | None,
    abort_share: float,
    max_new_tokens: int,
    seed: int,
) -> Iterator[Arrival]:
    order = list(range(len(prompts)))
    choice, aborts = random.Random(f"{seed} prompts"), random.Random(f"{seed} aborts")
    for number, at in enumerate(times):
        if (num_requests is not None and number >= num_requests) or (duration_s is not None and at >= duration_s):
            return
        if number % len(order) == 0:
            choice.shuffle(order)
        prompt = order[number % len(order)]
        leaves = aborts.random() < abort_share
        after = aborts.randrange(max(max_new_tokens, 1)) if leaves else None
        yield Arrival(at, prompt, prompts[prompt], seed + number, after)
