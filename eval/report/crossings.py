"""Where a curve of speedups passes 1.0, and the sentence that says it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise


def crossings(xs: Sequence[float], speedups: Sequence[float], is_log: bool = False) -> list[float]:
    """Return where straight lines between neighbours pass 1.0, by rising x; `is_log`: lines over a logarithmic axis."""
    found = []
    for (x0, y0), (x1, y1) in pairwise(sorted(zip(xs, speedups, strict=True))):
        if (y0 > 1) != (y1 > 1):
            share = (1 - y0) / (y1 - y0)
            found.append(x0 * (x1 / x0) ** share if is_log else x0 + (x1 - x0) * share)
    return found


def where_it_pays(what: str, xs: Sequence[float], speedups: Sequence[float], is_log: bool = False) -> str:
    """Return, for example, "pays up to batch_size 4, no longer at 8 (passes 1.0 near 5.6)"."""
    pairs = sorted(zip(xs, speedups, strict=True))
    near = ", ".join(f"{x:.3g}" for x in crossings(xs, speedups, is_log))
    runs = [(pays, [x for x, _ in part]) for pays, part in groupby(pairs, key=lambda pair: pair[1] > 1)]
    if len(runs) == 1:
        pays, seen = runs[0]
        return f"{'pays' if pays else 'does not pay'} at any {what} from {seen[0]:g} to {seen[-1]:g}"
    if len(runs) == 2:
        (pays, first), (_, second) = runs
        if pays:
            return f"pays up to {what} {first[-1]:g}, no longer at {second[0]:g} (passes 1.0 near {near})"
        return f"pays from {what} {second[0]:g} on, not yet at {first[-1]:g} (passes 1.0 near {near})"
    good = ", ".join(_span(seen) for pays, seen in runs if pays)
    return f"pays at {what} {good} and not between (passes 1.0 near {near})"


def _span(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
