"""Where the time of a token goes, and how long callers wait, of one point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec.eval.records import BASELINE, CONTROL
from specdec.eval.report.drawing import Picture, drawing, folded, legend_above
from specdec.eval.report.gather import Point
from specdec.eval.report.looks import INK, LINE, MUTED, PAGE, Looks, keeps_output, label

# Name, colour and edge of each part, none of them a drafter's: one of the two can be told from the page.
_PARTS = {"draft_s": ("draft", INK, PAGE), "verify_s": ("verify", MUTED, PAGE), "other_s": ("other", LINE, MUTED)}
_MARKED = 13  # a curve has a marker at every so many of its points
_SHARES = np.array([*np.linspace(0, 0.98, 50), 0.99, 1.0])


def time_split(point: Point, looks: Looks) -> Picture | None:
    """Draw the time of a token in decode, split into drafting, verification and the rest."""
    rows: list[tuple[Any, ...]] = []
    for info in point.variants:
        own = point.summary["variants"][info.name]
        if own["decode_tokens_per_s"]:
            spent = [own[part] for part in _PARTS]
            whole = 1e3 / own["decode_tokens_per_s"]
            parts = [whole * part / sum(spent) for part in spent] if sum(spent) else [None] * len(_PARTS)
            rows.append((label(info), keeps_output(info), whole, *parts))
    if not rows:
        return None
    with drawing(1.1 + 0.4 * len(rows)) as (figure, axes):
        for number, (name, colour, edge) in enumerate(_PARTS.values()):
            known = [(place, row) for place, row in enumerate(rows) if row[3 + number] is not None]
            left = [sum(row[3 : 3 + number]) for _, row in known]
            lengths = [row[3 + number] for _, row in known]
            style = {"color": colour, "edgecolor": edge, "linewidth": 0.8, "label": name}
            axes.barh([place for place, _ in known], lengths, 0.7, left, **style)
        unknown = [(place, row[2]) for place, row in enumerate(rows) if row[3] is None]
        if unknown:
            places, widths = zip(*unknown, strict=True)
            axes.barh(places, widths, 0.7, color="none", edgecolor=INK, label="not told apart")
        axes.set_yticks(range(len(rows)), folded([row[0] for row in rows]))
        axes.invert_yaxis()
        axes.set_xlabel("ms per token in decode")
        axes.grid(visible=False, axis="y")
        legend_above(figure, axes)
    return Picture(
        key="time-split",
        title="Where the time goes",
        text="Stacked bars of the time per token: "
        + "; ".join(f"{row[0]} {row[2]:.3g} ms" + ("" if row[3] is None else _split_text(row)) for row in rows),
        notes=[
            "A bar is as long as a token takes in decode (of all requests of the batch together). Its parts are the "
            "shares of drafting, of the target's forward with the verifier, and of the rest of the step.",
            "Other systems do not tell their parts apart.",
        ],
        columns=("variant", "lossless", "ms_per_token", *(f"{name}_ms" for name, *_ in _PARTS.values())),
        rows=rows,
        figure=figure,
    )


def _split_text(row: Sequence[Any]) -> str:
    draft, verify, other = (part / row[2] for part in row[3:])
    return f" ({draft:.0%} draft, {verify:.0%} verify, {other:.0%} other)"


def first_token(point: Point, looks: Looks) -> Picture | None:
    """Draw the distribution of the time to the first token."""
    waits = {i.name: [r.ttft_s for s in point.records.of(i.name) for r in s.requests] for i in point.variants}
    return _distribution(
        point,
        looks,
        waits,
        key="ttft",
        title="Time to first token (TTFT)",
        notes=["Share of the answers whose first token came within the time: from the batch handed in."],
    )


def between_tokens(point: Point, looks: Looks) -> Picture | None:
    """Draw the distribution of the gaps between emissions."""
    gaps = {
        i.name: [gap for s in point.records.of(i.name) for r in s.requests for gap in r.itl_s] for i in point.variants
    }
    each = "; ".join(
        f"{label(info)} {tokens:.2f}"
        for info in point.variants
        if (tokens := point.summary["variants"][info.name]["tokens_per_emission"]) is not None
    )
    return _distribution(
        point,
        looks,
        gaps,
        key="itl",
        title="Gaps between emissions (ITL)",
        notes=[f"An emission may hold several tokens. Tokens per emission: {each}."],
    )


def _distribution(
    point: Point, looks: Looks, seconds: dict[str, list[float]], *, key: str, title: str, notes: list[str]
) -> Picture | None:
    """Draw what share of the times lies below each, by variant."""
    curves = {name: 1e3 * np.quantile(values, _SHARES) for name, values in seconds.items() if values}
    infos = [info for info in point.variants if info.name in curves]
    if not infos:
        return None
    with drawing(3.4) as (figure, axes):
        for number, info in enumerate(infos):
            style = looks.line(info) | {"markevery": (2 * number % _MARKED, _MARKED)}  # of each curve at other places
            if info.name in (BASELINE, CONTROL):
                style |= {"linewidth": 2.2, "linestyle": "-" if info.name == BASELINE else ":", "marker": ""}
            axes.plot(curves[info.name], _SHARES, label=label(info), **style)
        axes.set_ylabel("share")
        axes.set_ylim(0, 1.02)
        log_axis(axes.xaxis, [value for curve in curves.values() for value in curve])
        axes.set_xlabel("ms")
        legend_above(figure, axes)
    medians = "; ".join(f"{label(info)} {curves[info.name][25]:.3g} ms" for info in infos)
    return Picture(
        key=key,
        title=title,
        text=f"Rising curves of shares over milliseconds. Medians: {medians}.",
        notes=notes,
        columns=("variant", "lossless", "share", "ms"),
        rows=[
            (info.name, keeps_output(info), round(float(share), 2), float(value))
            for info in infos
            for share, value in zip(_SHARES, curves[info.name], strict=True)
        ],
        figure=figure,
    )


def log_axis(axis: Any, values: Sequence[float], base: int = 10) -> None:
    """Give an axis a logarithmic scale with plain numbers, if its values ask for one."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if min(values) <= 0 or max(values) < 4 * min(values):
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
