"""Acceptance by category and by position, of one point."""

from __future__ import annotations

from typing import Any

from specdec.eval.records import BASELINE, CONTROL
from specdec.eval.report.drawing import Picture, drawing, legend_above
from specdec.eval.report.gather import Point
from specdec.eval.report.looks import Looks, keeps_output, label
from specdec.eval.report.speed_figures import by_category

_LENGTH = "Acceptance length: tokens per target forward, the next token included; 1.0 is the undrafted engine."


def acceptance_by_category(point: Point, looks: Looks) -> Picture | None:
    """Draw the acceptance length of each variant in each category."""
    infos = [info for info in point.variants if info.name not in (BASELINE, CONTROL)]

    def length(category: str, name: str) -> dict[str, Any] | None:
        own = point.summary["categories"][category].get(name)
        return None if own is None or own["acceptance_length"] is None else {"median": own["acceptance_length"]}

    return by_category(
        point,
        infos,
        looks,
        length,
        key="acceptance-by-category",
        title="Acceptance length by category",
        axis="acceptance length",
        notes=[_LENGTH],
        baseline=1.0,
    )


def acceptance_by_position(point: Point, looks: Looks) -> Picture | None:
    """Draw what share of the steps accepted at each depth, of all steps and of those that came there."""
    kinds = ("unconditional", "conditional")
    drawn = []
    for info in point.variants:
        own = point.summary["variants"][info.name]
        if own.get("acceptance_at_unconditional"):
            drawn.append((info, own["tree"], {kind: own[f"acceptance_at_{kind}"] for kind in kinds}))
    if not drawn:
        return None
    with drawing(3.3, 1, 2, sharey=True, sharex=True) as (figure, axes):
        for kind, place in zip(kinds, axes[0], strict=True):
            for info, is_tree, shares in drawn:
                known = [(depth, share) for depth, share in enumerate(shares[kind], 1) if share is not None]
                name = f"{label(info)}, tree" if is_tree else label(info)
                place.plot(*zip(*known, strict=True), label=name, **looks.line(info))
            place.set_title("of all steps" if kind == "unconditional" else "of steps that came to it")
            place.set_xlabel("depth in the draft")
            place.xaxis.get_major_locator().set_params(integer=True)
            place.set_ylim(0, 1.03)
        axes[0][0].set_ylabel("share accepted")
        legend_above(figure, axes[0][0])
    shown = "; ".join(f"{label(info)} {shares['unconditional'][0]:.0%}" for info, _, shares in drawn)
    return Picture(
        key="acceptance-by-position",
        title="Acceptance by position",
        text=f"Two panels of lines that fall with depth. Accepted at the first position: {shown}.",
        notes=[
            "Left: steps that accepted at this depth, of all steps. Right: of the steps that accepted at the depth "
            "before and drafted at this one.",
            "Of a tree it is the depth along the accepted path.",
        ],
        columns=("variant", "lossless", "tree", "depth", *kinds),
        rows=[
            (info.name, keeps_output(info), is_tree, depth, *pair)
            for info, is_tree, shares in drawn
            for depth, pair in enumerate(zip(shares["unconditional"], shares["conditional"], strict=True), 1)
        ],
        figure=figure,
    )
