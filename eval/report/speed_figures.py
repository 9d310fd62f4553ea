"""Speedup by variant and by category, of one point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.eval.records import BASELINE, CONTROL, VariantInfo
from specdec.eval.report.drawing import Picture, drawing, folded, legend_above, mark_baseline, whiskers
from specdec.eval.report.gather import Point
from specdec.eval.report.looks import INK, Looks, keeps_output, label

SPEEDUP = "speedup over the undrafted engine"
_INTERVALS = (
    "Whiskers are 95 % bootstrap intervals of the median over conversations, or over full batches of several prompts; "
    "fewer than 6 have none. The line at 1.0 is the undrafted engine."
)


def speedups(point: Point, looks: Looks) -> Picture | None:
    """Draw decode and end-to-end speedup of each variant."""
    found = [(info, point.speedup(info.name), point.speedup(info.name, "e2e")) for info in point.variants]
    known = [(info, decode, e2e) for info, decode, e2e in found if decode is not None]
    if not known:
        return None
    with drawing(0.9 + 0.52 * len(known)) as (figure, axes):
        for place, (info, decode, e2e) in enumerate(known):
            _bar(axes, place - 0.2, decode, 0.4, looks.bar(info))
            if e2e is not None:
                _bar(axes, place + 0.19, e2e, 0.26, looks.bar(info) | {"alpha": 0.55})
        mark_baseline(axes, is_vertical=True)
        axes.set_yticks(range(len(known)), folded([label(info) for info, *_ in known]))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("speedup: wide bars decode, narrow bars end to end")
        axes.grid(visible=False, axis="y")
    best = max(known, key=lambda entry: entry[1]["median"])
    return Picture(
        key="speedup",
        title="Speedup by variant",
        text=f"Bars of {len(known)} variants; the longest is {label(best[0])} with {best[1]['median']:.2f} in decode.",
        notes=[
            _INTERVALS,
            "End to end has prefill in it, and is only told where both gave the same number of tokens. Bars hatched "
            "aslant change the output: they are lossy.",
        ],
        columns=("variant", "lossless", "what", "median", "low", "high"),
        rows=[
            (info.name, keeps_output(info), what, *_triple(ratio))
            for info, decode, e2e in known
            for what, ratio in (("decode", decode), ("end to end", e2e))
            if ratio is not None
        ],
        figure=figure,
    )


def speedups_by_category(point: Point, looks: Looks) -> Picture | None:
    """Draw the decode speedup of each variant in each category."""
    infos = [info for info in point.variants if info.name not in (BASELINE, CONTROL)]
    return by_category(
        point,
        infos,
        looks,
        lambda category, name: (point.summary["categories"][category].get(name) or {}).get("speedup"),
        key="speedup-by-category",
        title="Speedup by category",
        axis=SPEEDUP,
        notes=[_INTERVALS],
        baseline=1.0,
    )


def by_category(
    point: Point,
    infos: Sequence[VariantInfo],
    looks: Looks,
    ratio_of: Any,
    *,
    key: str,
    title: str,
    axis: str,
    notes: list[str],
    baseline: float | None,
) -> Picture | None:
    """Draw bars of variants in groups of categories.

    Args:
        point: whose categories are drawn.
        infos: of the variants.
        looks: of the variants.
        ratio_of: category, name -> `median` and perhaps `low` and `high`; or None.
        key: of the picture.
        title: of the picture.
        axis: what the bars show.
        notes: how to read it.
        baseline: where a line is drawn; None draws none.
    """
    values = {
        (category, info.name): ratio
        for category in point.summary["categories"]
        for info in infos
        if (ratio := ratio_of(category, info.name)) is not None
    }
    categories = list(dict.fromkeys(category for category, _ in values))
    infos = [info for info in infos if any(name == info.name for _, name in values)]
    if not values:
        return None
    width = 0.84 / len(infos)
    with drawing(0.9 + len(categories) * (0.16 + 0.15 * len(infos))) as (figure, axes):
        for number, info in enumerate(infos):
            own = [(place, values.get((category, info.name))) for place, category in enumerate(categories)]
            bars = looks.bar(info) | {"label": label(info)}
            for place, ratio in own:
                if ratio is not None:
                    _bar(axes, place + (number - (len(infos) - 1) / 2) * width, ratio, width, bars)
                    bars.pop("label", None)
        if baseline is not None:
            axes.axvline(baseline, color=INK, linewidth=1.2)
        axes.set_yticks(range(len(categories)), folded(categories))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel(axis)
        axes.grid(visible=False, axis="y")
        legend_above(figure, axes)
    (category, name), best = max(values.items(), key=lambda item: item[1]["median"])
    return Picture(
        key=key,
        title=title,
        text=f"Bars of {len(infos)} variants in {len(categories)} categories; the longest is {name} in {category} "
        f"with {best['median']:.2f}.",
        notes=notes,
        columns=("category", "variant", "lossless", "median", "low", "high"),
        rows=[
            (category, info.name, keeps_output(info), *_triple(values[category, info.name]))
            for category in categories
            for info in infos
            if (category, info.name) in values
        ],
        figure=figure,
    )


def _triple(ratio: dict[str, Any]) -> tuple[float | None, ...]:
    return ratio["median"], ratio.get("low"), ratio.get("high")


def _bar(axes: Any, place: float, ratio: dict[str, Any], height: float, style: dict[str, Any]) -> None:
    axes.barh(place, ratio["median"], height, **style)
    if ratio.get("low") is not None:
        axes.errorbar(ratio["median"], place, xerr=whiskers([ratio]), color=INK, linewidth=1, capsize=2)
