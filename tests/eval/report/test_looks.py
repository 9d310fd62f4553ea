from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specdec.eval.records import VariantInfo
from specdec.eval.report.gather import gather
from specdec.eval.report.looks import Looks
from specdec.eval.report.speed_figures import speedups_by_category
from specdec.eval.report.time_figures import between_tokens
from tests.eval.report.made_up import VARIANTS, Made, write_point

MANY = [VariantInfo(f"v{i}", "engine", f"v{i}", "match", max_draft_tokens=2) for i in range(16)]


@pytest.mark.parametrize("lossless", [True, False])
def test_sixteen_variants_look_different_in_bars_and_in_lines(lossless: bool) -> None:
    looks = Looks(info.name for info in MANY)
    infos = [replace(info, lossless=lossless) for info in MANY]
    bars = [looks.bar(info) for info in infos]
    lines = [looks.line(info) for info in infos]
    assert len({(bar["color"], bar.get("hatch")) for bar in bars}) == len(infos)
    assert len({(line["color"], str(line["linestyle"])) for line in lines}) == len(infos)  # some have no markers
    for info, bar, line in zip(infos, bars, lines, strict=True):
        other = replace(info, lossless=not lossless)
        assert bar.get("hatch") != looks.bar(other).get("hatch")
        assert line["linestyle"] != looks.line(other)["linestyle"]


def test_bars_of_the_ninth_variant_are_drawn_with_a_texture(tmp_path: Path) -> None:
    for count, textured in ((8, 0), (10, 2)):
        made = Made(repeats=1, num_cases=2, num_tokens=8, variants=(VARIANTS[0], *MANY[:count]))
        points = gather([write_point(tmp_path / str(count), made)]).points
        picture = speedups_by_category(points[0], Looks(info.name for info in points[0].variants))
        assert picture is not None
        assert picture.svg.count("<pattern") == textured


def test_a_long_legend_leaves_room_for_the_curves_which_have_markers(tmp_path: Path) -> None:
    heights = []
    for count in (2, 16):
        made = Made(repeats=1, num_cases=2, num_tokens=8, variants=(VARIANTS[0], *MANY[:count]))
        (point,) = gather([write_point(tmp_path / str(count), made)]).points
        looks = Looks(info.name for info in point.variants)
        picture = between_tokens(point, looks)
        assert picture is not None
        (axes,) = picture.figure.axes
        assert [line.get_marker() for line in axes.lines] == ["", *(looks.marker(info.name) for info in MANY[:count])]
        assert picture.png
        heights.append(axes.get_window_extent().height)
    assert heights[1] > 0.8 * heights[0]
