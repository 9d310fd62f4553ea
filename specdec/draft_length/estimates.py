"""What a draft-length policy knows of a drafter: how often its tokens are accepted and how long drafting takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Before anything is known: acceptance is taken to be good, so that an expensive drafter is tried at all, and a draft
# token to cost this share of a target step, so that it is not taken to be free.
_PRIOR_ACCEPTANCE, _PRIOR_COST = 0.8, 0.3
_PRIOR_TRIALS = 4.0  # the weight of that, in trials: one failure is no verdict
_LEAST_PRIOR_TRIALS, _MOST_PRIOR_TRIALS = 2.0, 8.0  # the weight of everyone's acceptance for a request's
_LEAST_ACCEPTANCE = 0.005
_OWN_MEMORY, _ALL_MEMORY = 0.96, 0.99  # weight of a trial that is one trial old: about 25 and 100 trials count
_COST_MEMORY, _ANSWER_MEMORY = 0.9, 0.98
_LEAST_ANSWERS = 0.02
_UNSURE = 3  # samples of a cost that is still taken to hold one-time work
_OVERHEAD_DOUBT = 0.05  # how much is needed to tell a fixed cost from one per token; see `_Line.solve`


@dataclass(slots=True)
class Average:
    """A mean over values of which older ones count less."""

    memory: float
    total: float = 0.0
    weight: float = 0.0
    faded: float = 1.0  # weight of a value before the first one

    def add(self, value: float, weight: float = 1.0) -> None:
        self.faded *= self.memory
        self.total = self.total * self.memory + value * weight
        self.weight = self.weight * self.memory + weight

    def mean(self, prior: float, prior_weight: float = _PRIOR_TRIALS) -> float:
        """Return the mean, with `prior` counted as so many values."""
        return (self.total + prior_weight * prior) / (self.weight + prior_weight)

    def given(self, everyone: Average, prior: float) -> float:
        """Return one request's mean, to which everyone's is a prior that fades as its own values come in.

        The more is known of everyone, the more of its own it takes to differ; in the end only its own count.
        """
        weight = min(_LEAST_PRIOR_TRIALS + everyone.weight / 2, _MOST_PRIOR_TRIALS)
        return self.mean(everyone.mean(prior), weight * self.faded)


@dataclass(slots=True)
class Acceptance:
    """How a drafter's tokens fare: the first of a chain, those after an accepted one, and whole trees.

    Only judged tokens are trials. What was drafted behind a rejected token is no evidence, and a draft length that
    depended on it would depend on noise that the next step uses again.
    """

    memory: float
    first: Average = field(init=False)
    later: Average = field(init=False)
    per_tree: Average = field(init=False)  # accepted tokens of a drafted step

    def __post_init__(self) -> None:
        self.first, self.later, self.per_tree = Average(self.memory), Average(self.memory), Average(self.memory)

    def add(self, accepted: int, judged: int) -> None:
        """Count one drafted step of which the first `judged` depths were judged and `accepted` were accepted."""
        if judged:
            self.first.add(float(accepted > 0))
        for depth in range(1, judged):
            self.later.add(float(accepted > depth))
        self.per_tree.add(accepted)


def own_acceptance() -> Acceptance:
    """Return the record of one request."""
    return Acceptance(_OWN_MEMORY)


def all_acceptance() -> Acceptance:
    """Return the record of all requests of a drafter, from which a new one starts."""
    return Acceptance(_ALL_MEMORY)


def chain_gains(own: Acceptance, everyone: Acceptance, most: int) -> list[float]:
    """Return, for draft token 1 .. `most` of a chain, the probability that it is accepted, up to where none is likely.

    Never increasing.
    """
    first = own.first.given(everyone.first, _PRIOR_ACCEPTANCE)
    # Until it shows otherwise, an accepted token says nothing about the next one.
    later = own.later.given(everyone.later, first)
    gains: list[float] = []
    while len(gains) < most and first >= _LEAST_ACCEPTANCE:
        gains.append(first)
        first *= later
    return gains


def tree_gain(own: Acceptance, everyone: Acceptance) -> float:
    """Return how many tokens of a tree will be accepted."""
    return own.per_tree.given(everyone.per_tree, _PRIOR_ACCEPTANCE)


@dataclass(slots=True)
class _Line:
    """seconds = fixed + each * depth, fitted to samples of which older ones count less."""

    weight: float = 0.0
    depth: float = 0.0
    depth2: float = 0.0
    seconds: float = 0.0
    depth_seconds: float = 0.0
    num_samples: int = 0
    is_guess: bool = False  # what it holds is a bound; the first real sample replaces it

    def add(self, depth: int, seconds: float, is_guess: bool = False) -> None:
        predicted = self.at(depth)
        if self.num_samples >= _UNSURE:
            # A pause of the machine must not decide over the next steps; a lasting change still gets through.
            seconds = min(seconds, 3.0 * predicted) if predicted > 0 else seconds
        elif self.is_guess or seconds < 0.5 * predicted:
            self.weight = self.depth = self.depth2 = self.seconds = self.depth_seconds = 0.0
        self.is_guess = is_guess
        self.num_samples += not is_guess
        new = (1.0, float(depth), float(depth * depth), seconds, depth * seconds)
        old = (self.weight, self.depth, self.depth2, self.seconds, self.depth_seconds)
        sums = [a * _COST_MEMORY + b for a, b in zip(old, new, strict=True)]
        self.weight, self.depth, self.depth2, self.seconds, self.depth_seconds = sums

    def solve(self) -> tuple[float, float | None]:
        """Return (fixed, each), neither negative; `each` is None while nothing was drafted.

        Least squares with a penalty on `fixed`: depths that hardly differ say nothing about it, and then all of the
        time is taken to be proportional.
        """
        if not self.depth2:
            return self.seconds / self.weight, None
        penalised = self.weight * (1 + _OVERHEAD_DOUBT)
        determinant = penalised * self.depth2 - self.depth * self.depth
        fixed = (self.depth2 * self.seconds - self.depth * self.depth_seconds) / determinant
        each = (penalised * self.depth_seconds - self.depth * self.seconds) / determinant
        if fixed < 0:
            return 0.0, self.depth_seconds / self.depth2
        return (fixed, each) if each >= 0 else (self.seconds / self.weight, 0.0)

    def at(self, depth: int) -> float:
        if not self.weight:
            return 0.0
        fixed, each = self.solve()
        return fixed + (each or 0.0) * depth


class DraftCost:
    """Seconds that drafting takes, learned from what it took.

    Args:
        step_s: t(M), for how a forward grows with its rows and what a token costs while nothing is known.
    """

    def __init__(self, step_s: Callable[[int], float]) -> None:
        self._step_s = step_s
        self._lines: dict[int, _Line] = {}  # batches of 1, 2, 3-4, 5-8, ...: in seconds of a batch of 1
        self._answered = Average(_ANSWER_MEMORY)

    @property
    def is_blank(self) -> bool:
        """True until anything has been timed."""
        return not self._lines

    @property
    def is_known(self) -> bool:
        """False until a draft, or the lack of one a few times, has been timed."""
        return any(_tells(line) for line in self._lines.values())

    def knows(self, batch: int) -> bool:
        """Tell whether a draft has been timed for about so many requests."""
        line = self._lines.get((batch - 1).bit_length())
        return line is not None and _tells(line)

    def add(self, batch: int, answered: int, depth: int, seconds: float, *, num_unseen: int = 0) -> None:
        """Learn from one `propose`.

        Args:
            batch: requests that were asked.
            answered: how many of them got a draft.
            depth: of the deepest draft.
            seconds: of the call.
            num_unseen: tokens the drafter may have had to catch up with: a new request's prompt, or what was
                generated while it was not asked.
        """
        self._answered.add(answered / batch, batch)
        bucket = (batch - 1).bit_length()
        line = self._lines.get(bucket, _Line())
        scaled = seconds / self._scale(batch)
        if num_unseen and self.is_known:
            # Catching up only adds time, so this shows at most that drafting has become cheaper.
            if not line.num_samples or scaled >= line.at(depth):
                return
        elif num_unseen:
            # With its first forward over all of that, drafting without it would take at least `least`, and at most
            # what this took.
            least = scaled * self._step_s(1) / self._step_s(num_unseen)
            scaled = min(max(least, line.at(depth)), scaled)
        line.add(depth, scaled, is_guess=bool(num_unseen) and not line.num_samples)
        self._lines[bucket] = line

    def parts(self, batch: int) -> tuple[float, float]:
        """Return (fixed, each) in seconds for a batch: a draft of depth d takes fixed + d * each.

        A drafter that often has no answer is asked in vain in between; that is part of what a draft costs.
        """
        fixed, each = 0.0, None
        known = [b for b, line in self._lines.items() if line.depth2] or list(self._lines)
        if known:
            bucket = (batch - 1).bit_length()
            fixed, each = self._lines[min(known, key=lambda b: abs(b - bucket))].solve()
        if each is None:
            each = _PRIOR_COST * self._step_s(1)
        scale = self._scale(batch)
        return scale * fixed / max(self._answered.mean(1.0), _LEAST_ANSWERS), scale * each

    def _scale(self, batch: int) -> float:
        return self._step_s(batch) / self._step_s(1)


def _tells(line: _Line) -> bool:
    return line.num_samples > 0 and (line.depth2 > 0 or line.num_samples >= _UNSURE)
