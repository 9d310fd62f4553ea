"""How a variant looks in every figure: one colour, marker and texture, one label; LOSSY ones hatched and said to be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec.eval.records import BASELINE, CONTROL, VariantInfo

INK, MUTED, LINE, PAGE = "#1b1e23", "#626972", "#d3d7dd", "#fefefe"  # roles; the page puts its own colours there
# Distinct for the common kinds of colour blindness and 3:1 on a white page; style.css has their partners for a dark
# one, of the same order. Source of the first four hues: Okabe and Ito 2008, "Color Universal Design".
SERIES = ("#0072b2", "#d55e00", "#00845f", "#b0508c", "#7d6a00", "#5b4fc4", "#8a3b12", "#2b8aa6")
_MARKERS = "osD^vPX*p<>h"
HATCH = "////"
# Of the first eight variants, the next eight, which have their colours again, and so on: the texture of bars, and the
# dashes of lossless and of lossy lines.
_ROUNDS: tuple[tuple[str, Any, Any], ...] = (
    ("", "-", (0, (4, 2))),
    ("||||", (0, (9, 2, 2, 2)), (0, (4, 2, 2, 2))),
    ("....", (0, (9, 2, 2, 2, 2, 2)), (0, (4, 2, 2, 2, 2, 2))),
)


class Looks:
    """Gives each variant its looks, by the order in which the report first meets it: 24 are different."""

    def __init__(self, names: Iterable[str]) -> None:
        drafting = [name for name in dict.fromkeys(names) if name not in (BASELINE, CONTROL)]
        self._places = {name: place for place, name in enumerate(drafting)}

    def colour(self, name: str) -> str:
        return MUTED if name not in self._places else SERIES[self._places[name] % len(SERIES)]

    def marker(self, name: str) -> str:
        return "o" if name not in self._places else _MARKERS[self._places[name] % len(_MARKERS)]

    def _round(self, name: str) -> tuple[str, Any, Any]:
        return _ROUNDS[self._places.get(name, 0) // len(SERIES) % len(_ROUNDS)]

    def bar(self, info: VariantInfo) -> dict[str, Any]:
        """Return how bars of the variant are drawn."""
        edge = {"edgecolor": PAGE, "linewidth": 0.5}
        texture = self._round(info.name)[0] + ("" if info.lossless else HATCH)
        return {"color": self.colour(info.name), **edge, **({"hatch": texture} if texture else {})}

    def line(self, info: VariantInfo) -> dict[str, Any]:
        """Return how lines of the variant are drawn: of lossy ones dashed, with hollow markers."""
        colour = self.colour(info.name)
        inside = colour if info.lossless else PAGE
        _, lossless, lossy = self._round(info.name)
        return {
            "color": colour,
            "linestyle": lossless if info.lossless else lossy,
            "marker": self.marker(info.name),
            "markersize": 5,
            "markerfacecolor": inside,
            "linewidth": 1.5,
        }


def label(info: VariantInfo) -> str:
    """Return the name of a variant as every figure and table says it."""
    return info.name if info.lossless else f"{info.name} (LOSSY)"


def keeps_output(info: VariantInfo) -> bool | None:
    """Return whether a variant keeps the target's distribution; None of a peer, which may have other weights."""
    return None if info.kind == "peer" and info.lossless else info.lossless
