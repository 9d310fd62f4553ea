"""How many tokens to draft for each request of a step, jointly: they share one forward and one round of drafting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

# A predicted gain below this is not worth the risk that the prediction is wrong.
LEAST_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step costs in seconds."""

    step_s: Sequence[float]  # [m]: a target forward of m rows, at least as long as any step that can be chosen
    draft_s: Callable[[int], tuple[float, float]]  # requests -> (fixed, per depth)
    rows: int  # of the step without drafts, prefill included
    tokens: int  # it gives without drafts


def choose(gains: Sequence[Sequence[float]], costs: Costs, *, width: int = 1, rate: float | None = None) -> list[int]:
    """Return how many units each request drafts: those with the most tokens per second, or all none.

    Args:
        gains: per request and depth, the tokens that drafting one unit more is expected to give; never increasing.
        costs: of the step.
        width: rows of a unit: 1 in a chain, the nodes of a whole tree.
        rate: tokens per second that time is worth; None = what this step itself makes of it.

    Returns:
        One count per request.
    """
    chosen = [0] * len(gains)
    plain_s = costs.step_s[costs.rows]
    least = costs.tokens / plain_s * LEAST_GAIN if rate is None else LEAST_GAIN * costs.tokens - rate * plain_s
    for units, draft_s in _plans(gains, costs):
        step_s = costs.step_s[costs.rows + width : costs.rows + width * len(units) + 1 : width]
        tokens = list(accumulate((gain for gain, _, _ in units), initial=costs.tokens))[1:]
        if rate is None:
            values = [n / (s + draft_s) for n, s in zip(tokens, step_s, strict=True)]
        else:
            values = [n - rate * (s + draft_s) for n, s in zip(tokens, step_s, strict=True)]
        best = max(values)
        if best > least:
            least = best
            chosen = [0] * len(gains)
            for _, _, request in units[: values.index(best) + 1]:
                chosen[request] += 1
    return chosen


def best_rate(gains: Sequence[Sequence[float]], costs: Costs, *, width: int = 1) -> float:
    """Return the tokens per second of a step that drafts what `choose` says."""
    counts = choose(gains, costs, width=width)
    tokens = costs.tokens + sum(sum(g[:n]) for g, n in zip(gains, counts, strict=True))
    return tokens / seconds(counts, costs, width=width)


def seconds(counts: Sequence[int], costs: Costs, *, width: int = 1) -> float:
    """Return how long a step with these drafts takes."""
    batch = sum(n > 0 for n in counts)
    fixed, each = costs.draft_s(batch) if batch else (0.0, 0.0)
    return costs.step_s[costs.rows + width * sum(counts)] + fixed + each * max(counts, default=0)


def _plans(gains: Sequence[Sequence[float]], costs: Costs) -> Iterator[tuple[list[tuple[float, int, int]], float]]:
    """Yield (units, seconds of drafting): the units of some requests down to some depth, best first.

    For a number of rows the best units are the likeliest ones, so a plan is a head of such a list. Drafting costs time
    by the number of requests and by the deepest draft, hence one list for each of both.
    """
    order = sorted((-gain, depth, request) for request, g in enumerate(gains) for depth, gain in enumerate(g))
    units = [(-gain, depth, request) for gain, depth, request in order]
    if not units:
        return
    # Depth 0 of the better request comes first, whatever the depth behind it.
    ranks = {request: rank for rank, (_, _, request) in enumerate(u for u in units if u[1] == 0)}
    deepest = 1 + max(depth for _, depth, _ in units)
    batch = 1
    while True:
        batch = min(batch, len(ranks))
        fixed, each = costs.draft_s(batch)
        among = units if batch == len(ranks) else [u for u in units if ranks[u[2]] < batch]
        is_free = fixed + each * deepest < 0.002 * costs.step_s[costs.rows]
        for depth in range(deepest if is_free else 1, deepest + 1):
            within = among if depth == deepest else [u for u in among if u[1] < depth]
            yield within, fixed + each * depth
        if batch == len(ranks):
            return
        batch *= 2
