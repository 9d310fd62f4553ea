"""A figure with its words and numbers: as SVG that takes the page's colours, as PNG, as CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdec.eval.report.looks import INK, LINE, MUTED, PAGE, SERIES

_WIDTH = 5.2  # inches; 374 CSS pixels, little more than a phone shows
_LEGEND_LETTERS = 58  # in a row
_LEGEND_ROWS, _LEGEND_ROW = 2, 0.17  # that every figure has room for; inches of one more
_SETTINGS: Any = {  # matplotlib types the keys one by one
    "svg.fonttype": "none",
    "svg.hashsalt": "specdec",  # the same figure has the same ids
    "text.parse_math": False,  # names may hold dollar signs
    "font.size": 10.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.edgecolor": LINE,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "hatch.linewidth": 0.8,
    "hatch.color": PAGE,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), LINE),
}
# The page says what these are; docs: custom properties in style.css.
_ROLES = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", PAGE: "var(--page)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)
}
_COLOUR = re.compile("|".join(_ROLES), re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure of the report."""

    key: str  # unique: of its files and ids
    title: str
    text: str  # what can be seen in it, for those who do not see it
    notes: Sequence[str]  # how to read it
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # everything that is drawn
    figure: Figure
    findings: Sequence[str] = ()  # what it says, in words

    @property
    def svg(self) -> str:
        """The figure as an inline image of the page's colours."""
        with _settings():
            whole = _saved(self.figure, "svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return _inline(whole.decode("utf-8"), self.key, self.title, self.text)

    @property
    def png(self) -> bytes:
        """The figure on white."""
        with _settings():
            return _saved(self.figure, "png", dpi=160, facecolor="white")

    @property
    def csv(self) -> str:
        """The numbers of the figure; empty where there is none."""
        return csv_of(self.columns, self.rows)


def csv_of(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()


@contextmanager
def drawing(height: float, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """Give a figure and its axes (one, or an array of two dimensions), with the report's settings while it is drawn.

    Args:
        height: in inches.
        rows: of axes.
        columns: of axes.
        options: of `Figure.subplots`.
    """
    with _settings():
        figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="none")
        FigureCanvasAgg(figure)
        one = rows == columns == 1
        yield figure, figure.subplots(rows, columns, squeeze=one, **options)


def mark_baseline(axes: Any, is_vertical: bool = False) -> None:
    """Draw the undrafted engine's 1.0."""
    (axes.axvline if is_vertical else axes.axhline)(1.0, color=INK, linewidth=1.2, linestyle="-", zorder=2)


def legend_above(figure: Figure, *axes: Any) -> None:
    """Draw a legend above all axes, of what any of `axes` shows, in as many columns as there is room for.

    The figure grows by the rows of a long one, so that the axes keep their height.
    """
    handles: dict[str, Any] = {}
    for one in axes:
        handles |= {name: handle for handle, name in zip(*one.get_legend_handles_labels(), strict=True)} | handles
    if handles:
        columns = min(len(handles), max(1, _LEGEND_LETTERS // (max(map(len, handles)) + 6)))
        figure.legend(handles.values(), handles, loc="outside upper left", ncols=columns)
        more_rows = max(0, -(-len(handles) // columns) - _LEGEND_ROWS)
        figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * more_rows)


def whiskers(ratios: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return how far intervals reach below and above their medians; no way where there is none."""
    lows = [ratio["median"] if ratio.get("low") is None else ratio["low"] for ratio in ratios]
    highs = [ratio["median"] if ratio.get("high") is None else ratio["high"] for ratio in ratios]
    return [
        [max(0.0, ratio["median"] - low) for ratio, low in zip(ratios, lows, strict=True)],
        [max(0.0, high - ratio["median"]) for ratio, high in zip(ratios, highs, strict=True)],
    ]


def folded(names: Sequence[str], letters: int = 16) -> list[str]:
    """Return names in lines short enough to stand beside an axis; they break at spaces and behind `_`, if they can."""
    return [
        "\n".join(line.replace("_ ", "_") for line in textwrap.wrap(name.replace("_", "_ "), letters)) or name
        for name in names
    ]


@contextmanager
def _settings() -> Iterator[None]:
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a name; the SVG has the text itself
        yield


def _saved(figure: Figure, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=kind, **options)
    return out.getvalue()


def _inline(svg: str, key: str, title: str, text: str) -> str:
    """Return matplotlib's SVG as part of a page: own ids, the page's colours and font, a name and a description."""
    found = re.search(r'viewBox="([^"]+)"', svg)
    assert found is not None, "matplotlib writes a viewBox"
    body = svg[svg.index(">", found.end()) + 1 :]
    body = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", body, flags=re.DOTALL)  # would hold for the page
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\1{key}-", body)
    body = re.sub(r'\bfill="(#\w{6})"', r'style="fill: \1"', body)  # an attribute cannot hold a custom property
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = _COLOUR.sub(lambda match: _ROLES[match.group().lower()], body)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'viewBox="{found.group(1)}" aria-labelledby="{key}-title {key}-text">'
        f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-text">{escape(text)}</desc>'
    )
    return head + body.strip()
