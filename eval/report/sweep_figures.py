"""Speedup against every number that the points of a report differ in, such as draft length and batch size."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.eval.records import BASELINE, CONTROL, VariantInfo
from specdec.eval.report.crossings import crossings, where_it_pays
from specdec.eval.report.drawing import Picture, drawing, legend_above, mark_baseline, whiskers
from specdec.eval.report.gather import Point, listed
from specdec.eval.report.looks import INK, Looks, keeps_output, label
from specdec.eval.report.prompt_set import prompts_needed
from specdec.eval.report.time_figures import log_axis

_ALWAYS = ("target", "dtype", "batch_size", "temperature")  # differ between runs without a sweep, too
MOST_PANELS = 8
_LINES = "drafter"  # its values are lines of their own in any case, by their variants' names
_MOST_NAMED = 24  # combinations that are not drawn
_RATIO = ("median", "low", "high")
_RUN = "run"  # what tells points apart that are equal in everything else


@dataclass(frozen=True, slots=True)
class _Curve:
    info: VariantInfo
    points: list[tuple[float, Point]]

    def ratios(self) -> list[tuple[float, dict[str, Any]]]:
        found = ((x, point.speedup(self.info.name)) for x, point in self.points)
        return [(x, ratio) for x, ratio in found if ratio is not None]


def sweeps(points: Sequence[Point], looks: Looks) -> list[Picture]:
    """Draw a figure for each number that differs."""
    keys = dict.fromkeys([key for point in points for key in point.records.header.overrides])
    keys |= dict.fromkeys(_ALWAYS)
    differing = {key: values for key in keys if len(set(values := [_text(p.setting(key)) for p in points])) > 1}
    found = []
    for key in differing:
        own = [point for point in points if _is_number(point.setting(key))]
        if len({point.setting(key) for point in own}) > 1:
            picture = _sweep(key, [other for other in differing if other not in (key, _LINES)], own, looks)
            if picture is not None:
                found.append(picture)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Any) -> str:
    """Return a setting as text; numbers that are equal, such as 0 and 0.0, are one text."""
    return "not set" if value is None else f"{value:.12g}" if _is_number(value) else str(value)


def _sweep(key: str, others: Sequence[str], points: Sequence[Point], looks: Looks) -> Picture | None:
    groups = _groups(key, others, points)
    panels = {name: curves for name, own in groups.items() if (curves := _curves(key, own))}
    if not panels:
        return None
    left_out = list(panels)[MOST_PANELS:]
    panels = dict(list(panels.items())[:MOST_PANELS])
    columns = 1 if len(panels) == 1 else 2
    lines = -(-len(panels) // columns)
    findings = []
    with drawing(0.6 + (3.0 if columns == 1 else 2.2) * lines, lines, columns, sharey=True) as (figure, axes):
        places = [axes] if columns == 1 else list(axes.flat)
        for unused in places[len(panels) :]:
            unused.set_visible(False)
        for place, (name, curves) in zip(places, panels.items(), strict=False):
            place.set_title(textwrap.fill(name, 56 // columns), fontsize="small")
            _scale(place, [x for curve in curves for x, _ in curve.ratios()])
            said = [sentence for curve in curves for sentence in _draw(place, key, curve, looks)]
            findings += [f"{name}: {' '.join(said)}"] if name and said else said
            mark_baseline(place)
            place.set_xlabel(key)
        places[0].set(ylabel="speedup", ylim=(0, None))
        legend_above(figure, *places[: len(panels)])
    notes = [
        "Bars are 95 % bootstrap intervals of the median over conversations, or over full batches of several prompts; "
        "the line at 1.0 is the undrafted engine; rings are where the lines between the medians pass it. Lossy "
        "variants are dashed and hollow.",
    ]
    if left_out:
        notes.append(
            f"{MOST_PANELS} of {MOST_PANELS + len(left_out)} combinations of the other settings are drawn. Not drawn: "
            f"{listed(left_out, _MOST_NAMED)}."
        )
    rows = [
        (name, curve.info.name, keeps_output(curve.info), x, *(ratio.get(k) for k in _RATIO), *_rest(curve, x))
        for name, curves in panels.items()
        for curve in curves
        for x, ratio in curve.ratios()
    ]
    return Picture(
        key="against-" + "".join(letter if letter.isalnum() else "-" for letter in key),
        title=f"Speedup against {key}",
        text=f"Lines of speedup over {key}. " + " ".join(findings),
        notes=notes,
        columns=("settings", "variant", "lossless", key, "speedup", "low", "high", "acceptance_length", "tokens_per_s"),
        rows=rows,
        figure=figure,
        findings=findings,
    )


def _groups(key: str, others: Sequence[str], points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points by their other settings, as text; by run too where two of a line would stand at one place."""

    def name(point: Point, with_run: bool) -> str:
        parts = [f"{other}={_text(point.setting(other))}" for other in others]
        return ", ".join([*parts, f"{_RUN} {point.run}"] if with_run else parts)

    for with_run in (False, True):
        groups: dict[str, list[Point]] = {}
        for point in points:
            groups.setdefault(name(point, with_run), []).append(point)
        places = [[(p.setting(key), i.name) for p in own for i in _drawn(p)] for own in groups.values()]
        if all(len(set(own)) == len(own) for own in places):
            break
    return groups


def _drawn(point: Point) -> list[VariantInfo]:
    return [info for info in point.variants if info.name not in (BASELINE, CONTROL)]


def _curves(key: str, points: Sequence[Point]) -> list[_Curve]:
    infos = {info.name: info for point in points for info in _drawn(point)}
    ordered = sorted(points, key=lambda point: point.setting(key))
    curves = [
        _Curve(info, [(p.setting(key), p) for p in ordered if any(i.name == info.name for i in p.variants)])
        for info in infos.values()
    ]
    return [curve for curve in curves if curve.ratios()]


def _draw(axes: Any, key: str, curve: _Curve, looks: Looks) -> list[str]:
    """Draw one line and return what it says about 1.0."""
    ratios = curve.ratios()
    xs, medians = [x for x, _ in ratios], [ratio["median"] for _, ratio in ratios]
    ends = whiskers([ratio for _, ratio in ratios])
    axes.errorbar(xs, medians, ends, label=label(curve.info), capsize=2, elinewidth=1, **looks.line(curve.info))
    ring = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgecolor": INK, "linestyle": "none"}
    is_log = axes.get_xscale() == "log"  # the vertical axis never is
    for x in crossings(xs, medians, is_log):
        axes.plot([x], [1.0], **ring)
    if len(set(xs)) < 2 or curve.info.kind != "engine":
        return []
    unknown = {
        f"{x:g}": prompts_needed(point.records.header)
        for x, point in curve.points
        if (own := point.speedup(curve.info.name)) is not None and own.get("low") is None
    }
    unclear = [f"{x:g}" for x, ratio in ratios if ratio.get("low") is not None and ratio["low"] <= 1 <= ratio["high"]]
    doubt = f", not clear at {', '.join(unclear)}, where the interval holds 1.0" if unclear else ""
    if unknown:
        takes = ", ".join(dict.fromkeys(unknown.values()))
        doubt += f", not clear at {', '.join(unknown)}, where there is no interval (it takes {takes})"
    return [f"{label(curve.info)} {where_it_pays(key, xs, medians, is_log)}{doubt}."]


def _rest(curve: _Curve, x: float) -> tuple[Any, Any]:
    own = next(point for at, point in curve.points if at == x).summary["variants"][curve.info.name]
    return own["acceptance_length"], own["decode_tokens_per_s"]


def _scale(axes: Any, xs: Sequence[float]) -> None:
    """Put ticks at the values that were measured."""
    log_axis(axes.xaxis, xs, base=2)
    ticks = sorted(set(xs))
    if len(ticks) <= 10:
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
