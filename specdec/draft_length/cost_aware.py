"""As many draft tokens as pay, down to none: measured acceptance and drafting time against the target's t(M)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from specdec.draft_length.choice import LEAST_GAIN, Costs, best_rate, choose, seconds
from specdec.draft_length.estimates import (
    Acceptance,
    Average,
    DraftCost,
    all_acceptance,
    chain_gains,
    own_acceptance,
    tree_gain,
)
from specdec.scheduler import Work

if TYPE_CHECKING:
    from specdec.acceptance import Verdict

_LEAST_WAIT_TOKENS = 64  # between two tries of a request that is not drafted for
_PROBE_SHARE = 0.005  # of the time at most goes into such tries
_MOST_SAVED_STEPS = 4.0
_SHAPE_MEMORY = 0.98
_PAUSE_TOKENS = 8  # after so many tokens without being asked, a drafter may have to catch up


class StepTimes(Protocol):
    """t(M), frozen: seconds of a target forward of M rows, never decreasing."""

    def at(self, rows: int) -> float: ...


@dataclass(slots=True)
class _Record:
    """What is known of one request."""

    acceptance: Acceptance = field(default_factory=own_acceptance)
    num_asked: int = 0
    since_asked: int = 0  # tokens
    wait: int = _LEAST_WAIT_TOKENS  # tokens to the next try while nothing is drafted


@dataclass(frozen=True, slots=True)
class _Try:
    """A draft of one unit for a request that would get none, to see whether that is still right."""

    request_id: int
    rows_s: float  # what its rows add to the forward
    draft_s: float  # what drafting is expected to take


class CostAwareLength:
    """Chooses the draft tokens of all requests of a step together, as those with the most tokens per second.

    The expected tokens come from a running estimate of acceptance, per request, starting from all requests before it;
    the seconds from the frozen t(M) over all rows of the step and from what drafting was seen to take. Trees are
    drafted whole or not at all. A request that is not drafted for is tried again with one token after 64 tokens, then
    after twice as many each time it fails; such tries take at most half a percent of the time.

    Choices are a deterministic function of `step_times`, t(M), and of what `learn` heard.

    Source: maximising tokens per predicted latency over draft lengths is the goodput of SmartSpec, Liu et al. 2024,
    arXiv 2406.14066.
    """

    name = "cost_aware"
    min_confidence = 0.0
    remembers = True

    def __init__(self, step_times: StepTimes) -> None:
        self.step_times = step_times
        self._seconds = [step_times.at(1)]  # [m]; nothing runs without rows
        self.reset()

    def reset(self) -> None:
        """Forget what drafts came to and what drafting took."""
        self._everyone = all_acceptance()
        self._cost = DraftCost(self._step_s)
        self._requests: dict[int, _Record] = {}
        self._tree_rows: Average | None = None  # mean drafted nodes, once a tree has been seen
        self._budget_s = 0.0  # what tries may take
        # Savings have a bound, so that a long quiet time is not followed by many tries; all of it buys one of any cost,
        # which may have been mistaken.
        self._most_saved_s = _MOST_SAVED_STEPS * self._seconds[0]
        self._since_try = _LEAST_WAIT_TOKENS  # tokens of all requests since one was tried
        self._trying: _Try | None = None  # of this step
        self._last: tuple[Any, list[int], Costs, int] | None = None  # the last answer of `_best`, while it holds

    # ------------------------------------------------------------------ choosing

    def allot(self, work: Sequence[Work]) -> Sequence[Work]:
        """Return the work with as many draft tokens as pay; see `DraftLength`."""
        self._trying = None
        able = [i for i, w in enumerate(work) if w.max_draft_tokens > 0]
        if not able:
            return work
        caps = [work[i].max_draft_tokens for i in able]
        counts = self._counts(work, [work[i].request.request_id for i in able], caps)
        if self._tree_rows is not None:
            counts = [cap if n else 0 for n, cap in zip(counts, caps, strict=True)]
        allotted = list(work)
        for i, n in zip(able, counts, strict=True):
            allotted[i] = replace(work[i], max_draft_tokens=n)
        return allotted

    def _counts(self, work: Sequence[Work], ids: list[int], caps: list[int]) -> list[int]:
        """Return how many units (tokens of a chain, or one tree) each request that may draft gets."""
        rows, tokens = sum(w.num_rows for w in work), sum(w.samples for w in work)
        key = (tuple(ids), tuple(caps), rows, tokens, sum(w.is_prefill for w in work))
        if self._last is None or self._last[0] != key:
            self._last = (key, *self._best(work, ids, caps))
        _, counts, costs, width = self._last
        counts = list(counts)
        if self._cost.is_blank or (any(counts) and not self._cost.is_known):
            return [int(i == 0) for i in range(len(ids))]  # what drafting takes is found out with one token for one
        if any(counts) and not self._cost.knows(sum(n > 0 for n in counts)):
            return [min(n, 1) for n in counts]  # and what it takes for so many requests, with one token for each
        if not any(w.is_prefill for w in work):
            self._try_one(counts, ids, costs, width)
        return counts

    def _best(self, work: Sequence[Work], ids: list[int], caps: list[int]) -> tuple[list[int], Costs, int]:
        """Return the units that pay best by what is known, the step's costs and the rows of a unit."""
        known = [self._record(request_id).acceptance for request_id in ids]
        if self._tree_rows is None:
            width = 1
            gains = [chain_gains(own, self._everyone, cap) for own, cap in zip(known, caps, strict=True)]
        else:
            width = min(max(caps), math.ceil(self._tree_rows.total / self._tree_rows.weight))
            gains = [[tree_gain(own, self._everyone)] for own in known]
        costs = self._costs(work, width * sum(caps))
        return choose(gains, costs, width=width, rate=self._worth(work, gains, costs, width)), costs, width

    def _record(self, request_id: int) -> _Record:
        return self._requests.setdefault(request_id, _Record())

    def _costs(self, work: Sequence[Work], most_rows: int) -> Costs:
        rows = sum(w.num_rows for w in work)
        self._step_s(rows + most_rows)
        return Costs(self._seconds, self._cost.parts, rows, sum(w.samples for w in work))

    def _step_s(self, rows: int) -> float:
        while len(self._seconds) <= rows:
            self._seconds.append(self.step_times.at(len(self._seconds)))
        return self._seconds[rows]

    def _worth(self, work: Sequence[Work], gains: list[list[float]], costs: Costs, width: int) -> float | None:
        """Return the tokens per second of a step without prefill, if this one has prefill rows.

        Beside a prompt a few draft rows look cheap per token of this step, which gives few; but time is worth what
        the steps to come make of it.
        """
        decode = sum(not w.is_prefill for w in work)
        if decode == len(work):
            return None
        return best_rate(gains, replace(costs, rows=decode, tokens=decode), width=width)

    def _try_one(self, counts: list[int], ids: list[int], costs: Costs, width: int) -> None:
        """Give one draft unit to a request that would get none and has waited long enough, if it can be afforded."""
        plain_s: float | None = None
        for i, request_id in enumerate(ids):
            if counts[i]:
                continue
            record = self._record(request_id)
            is_new = record.num_asked == 0 and self._since_try >= _LEAST_WAIT_TOKENS
            if not is_new and record.since_asked < record.wait:
                continue
            if plain_s is None:
                plain_s = seconds(counts, costs, width=width)
            counts[i] = 1
            extra_s = seconds(counts, costs, width=width) - plain_s
            rows = costs.rows + width * sum(counts)
            rows_s = costs.step_s[rows] - costs.step_s[rows - width]
            # The try of a request whose last one succeeded pays for itself, if it goes on succeeding. Otherwise it is
            # paid from savings, unless the rows alone, had drafting been free, would cost too much.
            if (record.wait == 0 and _could_pay(extra_s, costs)) or (
                min(extra_s, self._most_saved_s) <= self._budget_s and _could_pay(rows_s, costs)
            ):
                self._trying = _Try(request_id, rows_s, extra_s - rows_s)
                return
            counts[i] = 0

    # ------------------------------------------------------------------ learning

    def learn(self, work: Sequence[Work], verdicts: Sequence[Verdict], draft_s: float) -> None:
        """Take in what a step gave; see `DraftLength`.

        What may raise comes before anything is changed: a step that is undone must not have been learned from.
        """
        asked = [(w, v) for w, v in zip(work, verdicts, strict=True) if w.max_draft_tokens > 0]
        step_s = self._step_s(sum(w.num_rows for w in work))
        num_unseen = self._num_unseen(asked)
        self._step_s(max(len(asked), num_unseen, 1))  # what `DraftCost` will ask for
        tried, self._trying = self._tried(asked), None
        self._budget_s = min(self._budget_s + _PROBE_SHARE * step_s, self._most_saved_s)
        self._since_try += sum(len(v.tokens) for v in verdicts)
        if asked:
            self._last = None
            self._learn_shape(asked)
            self._learn_cost(asked, draft_s, num_unseen)
        for w, verdict in zip(work, verdicts, strict=True):
            if not w.is_prefill:
                record = self._record(w.request.request_id)
                record.since_asked += len(verdict.tokens)
                if w.max_draft_tokens > 0:
                    self._learn_request(record, verdict, is_try=tried is not None and tried[1] is verdict)
        if tried is not None:
            self._settle_try(*tried, draft_s, is_alone=len(asked) == 1)

    def _tried(self, asked: list[tuple[Work, Verdict]]) -> tuple[_Try, Verdict] | None:
        """Return this step's try and what came of it, or None: also where memory ran out and it was not made."""
        if self._trying is not None:
            for w, verdict in asked:
                if w.request.request_id == self._trying.request_id:
                    return self._trying, verdict
        return None

    def _num_unseen(self, asked: list[tuple[Work, Verdict]]) -> int:
        """Return how many tokens the drafter may have had to catch up with."""
        unseen = 0
        for w, verdict in asked:
            record = self._record(w.request.request_id)
            if not record.num_asked:
                unseen += len(w.request.tokens) - len(verdict.tokens)
            elif record.since_asked > _PAUSE_TOKENS:
                unseen += record.since_asked
        return unseen

    def _learn_shape(self, asked: list[tuple[Work, Verdict]]) -> None:
        if self._tree_rows is None and any(v.depth < v.drafted for _, v in asked):
            self._tree_rows = Average(_SHAPE_MEMORY)
            self._cost = DraftCost(self._step_s)  # from here on per tree, not per token
        if self._tree_rows is not None:
            for _, verdict in asked:
                if verdict.drafted:
                    self._tree_rows.add(verdict.drafted)

    def _learn_cost(self, asked: list[tuple[Work, Verdict]], draft_s: float, num_unseen: int) -> None:
        depth = max(v.depth for _, v in asked)
        if self._tree_rows is not None:
            depth = min(depth, 1)
        self._cost.add(len(asked), sum(v.drafted > 0 for _, v in asked), depth, draft_s, num_unseen=num_unseen)

    def _learn_request(self, record: _Record, verdict: Verdict, is_try: bool) -> None:
        record.num_asked += 1
        record.since_asked = 0
        if not is_try:
            record.wait = _LEAST_WAIT_TOKENS
        if verdict.drafted:
            accepted = verdict.num_accepted
            # A step that ended at an accepted token did not judge the next one.
            judged = accepted if len(verdict.tokens) == accepted else min(verdict.depth, accepted + 1)
            record.acceptance.add(accepted, judged)
            self._everyone.add(accepted, judged)

    def _settle_try(self, tried: _Try, verdict: Verdict, draft_s: float, *, is_alone: bool) -> None:
        """Pay for a try, and say when the next one is due."""
        self._budget_s -= tried.rows_s + (draft_s if is_alone else tried.draft_s)
        self._since_try = 0
        record = self._record(tried.request_id)
        if verdict.num_accepted:
            record.wait = 0
        elif verdict.drafted:
            record.wait = max(_LEAST_WAIT_TOKENS, 2 * record.wait)

    def release(self, request_id: int) -> None:
        """Forget a request; what it taught about the drafter stays."""
        self._requests.pop(request_id, None)


def _could_pay(extra_s: float, costs: Costs) -> bool:
    """Tell whether one more token for `extra_s` would be worth it."""
    return extra_s * LEAST_GAIN * costs.tokens < costs.step_s[costs.rows]
