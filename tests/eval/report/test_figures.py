from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from specdec.eval.report.acceptance_figures import acceptance_by_category, acceptance_by_position
from specdec.eval.report.crossings import crossings, where_it_pays
from specdec.eval.report.drawing import folded
from specdec.eval.report.gather import Point, gather
from specdec.eval.report.looks import SERIES, Looks
from specdec.eval.report.machine_figures import predictions, roofline, verify_cost, why_no_roofline
from specdec.eval.report.speed_figures import speedups, speedups_by_category
from specdec.eval.report.steps import forward_s, machine_of, predicted_speedup, step_cost
from specdec.eval.report.sweep_figures import MOST_PANELS, sweeps
from specdec.eval.report.time_figures import between_tokens, first_token, time_split
from tests.eval.report.made_up import DRAFT_S, VARIANTS, Made, write_point, write_sweep
from tests.eval.report.made_up import forward_s as made_forward_s

BUILDERS = [
    *(speedups, speedups_by_category, acceptance_by_category, acceptance_by_position),
    *(time_split, first_token, between_tokens, verify_cost, roofline),
]


@pytest.fixture(scope="module")
def point(tmp_path_factory: pytest.TempPathFactory) -> Point:
    return gather([write_point(tmp_path_factory.mktemp("made") / "run")]).points[0]


def looks_of(*points: Point) -> Looks:
    return Looks(info.name for point in points for info in point.variants)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_a_figure_has_words_numbers_and_an_image(point: Point, build: Callable[[Point, Looks], Any]) -> None:
    picture = build(point, looks_of(point))
    rows = list(csv.reader(picture.csv.splitlines()))
    assert rows[0] == list(picture.columns)
    assert len(rows) == len(picture.rows) + 1 > 1
    assert all(len(row) == len(picture.columns) for row in rows)
    assert picture.png.startswith(b"\x89PNG")
    svg = picture.svg
    assert svg.startswith("<svg ")
    assert f'aria-labelledby="{picture.key}-title {picture.key}-text"' in svg
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert all(name.startswith(f"{picture.key}-") for name in ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= ids  # nothing points outside of it
    assert "<text" in svg
    assert "<style" not in svg
    assert not re.search(r"#[0-9a-f]{6}\b", svg)  # every colour is the page's


def test_lossy_bars_are_hatched_and_said_to_be_lossy(point: Point) -> None:
    picture = speedups(point, looks_of(point))
    assert picture is not None
    assert "typical (LOSSY)" in picture.svg
    assert picture.svg.count("<pattern") == 2  # decode and end to end, of one variant
    lossless = gather([point.folder]).points[0]
    for info in list(lossless.records.header.variants):
        if not info.lossless:
            lossless.records.header.variants.remove(info)
    again = speedups(lossless, looks_of(lossless))
    assert again is not None
    assert "<pattern" not in again.svg


def test_a_variant_keeps_its_colour_wherever_it_is_drawn(point: Point) -> None:
    looks = looks_of(point)
    number = SERIES.index(looks.colour("eagle3"))
    assert looks.colour("none") == looks.colour("control") not in SERIES
    for build in (speedups, speedups_by_category, acceptance_by_category, between_tokens, verify_cost):
        assert f"var(--series-{number})" in build(point, looks).svg


def test_figures_without_their_numbers_are_left_out(tmp_path: Path) -> None:
    only_none = Made(variants=tuple(VARIANTS[:1]), with_machine=False, repeats=1)
    point = gather([write_point(tmp_path / "run", only_none)]).points[0]
    drawn = [build.__name__ for build in BUILDERS if build(point, looks_of(point)) is not None]
    assert drawn == ["time_split", "first_token", "between_tokens"]
    assert predictions([point], looks_of(point)) is None


def test_names_are_text_and_never_markup_or_formulas(tmp_path: Path) -> None:
    odd = replace(VARIANTS[2], name='<b>$x^2$ & "q" $')
    point = gather([write_point(tmp_path / "run", Made(variants=(VARIANTS[0], odd), repeats=1))]).points[0]
    picture = speedups(point, looks_of(point))
    assert picture is not None
    assert "&lt;b&gt;$x^2$ &amp; " in picture.svg
    assert "<b>" not in picture.svg


def test_steps_cost_what_the_fixture_made_them_cost(point: Point) -> None:
    cost = step_cost(point.records.of("draft_model"))
    assert cost is not None
    assert cost.num_rows == 6
    assert cost.draft_s == pytest.approx(DRAFT_S["draft_model"], rel=0.07)
    assert cost.verify_s == pytest.approx(made_forward_s(6), rel=0.07)
    assert step_cost(point.records.of("llama_cpp")) is None


def test_rows_of_a_batch_are_those_of_the_requests_that_still_run(tmp_path: Path) -> None:
    made = Made(batch_size=5, repeats=1, variants=tuple(VARIANTS[:3]))
    point = gather([write_point(tmp_path / "run", made)]).points[0]
    plain, drafting = (step_cost(point.records.of(name)) for name in ("none", "ngram"))
    assert plain is not None
    assert drafting is not None
    assert plain.num_rows == 5
    assert 15 < drafting.num_rows < 30  # 5 requests of 6 rows at first; some end before the others


def test_the_prediction_is_the_formula_on_the_page(point: Point) -> None:
    machine = point.records.machine
    assert machine is not None
    assert forward_s(machine, 6) == pytest.approx(made_forward_s(6))
    assert forward_s(machine, 129) is None
    for name in ("ngram", "draft_model"):
        expected = []
        for case in range(10):
            own = [r for s in point.records.of(name) for r in s.requests if r.case == case]
            steps = [len(r.steps or ()) for r in own]
            ratios = [
                39 / n * made_forward_s(1) / (made_forward_s(6) + (r.draft_s or 0) / n)
                for r, n in zip(own, steps, strict=True)
            ]
            expected.append(median(ratios))
        assert predicted_speedup(point, name, machine) == pytest.approx(median(expected), rel=1e-3)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_what_obeys_t_of_m_is_predicted_at_any_batch_size(tmp_path: Path, batch_size: int) -> None:
    """A machine of 10 + M ms: requests end at different times, so forwards have different numbers of rows."""

    def ten_and_one_ms(rows: float) -> float:
        return 0.010 + 0.001 * rows

    made = Made(
        *("exact", batch_size),
        num_cases=32,
        repeats=1,
        variants=tuple(VARIANTS[:4]),
        forward_s=ten_and_one_ms,
        noise=0.0,
        other_s=0.0,
    )
    point = gather([write_point(tmp_path / "run", made)]).points[0]
    assert point.records.machine is not None
    for name in ("ngram", "draft_model"):
        measured = point.speedup(name)
        assert measured is not None
        assert predicted_speedup(point, name, point.records.machine) == pytest.approx(measured["median"], rel=0.02)


def test_a_forward_reads_the_kv_of_every_request_and_multiplies_what_it_reads(tmp_path: Path) -> None:
    for batch_size in (1, 5):
        made = Made(f"b{batch_size}", batch_size, repeats=1, variants=tuple(VARIANTS[:1]))
        write_point(tmp_path / str(batch_size), made)
    rows = {}
    for point in gather([tmp_path]).points:
        picture = roofline(point, looks_of(point))
        assert picture is not None
        rows[point.records.header.batch_size] = {row[0]: row for row in picture.rows}
    flop = 2 * 538_000_000 / 4  # the weights that are read, not all parameters
    for batch_size, own in rows.items():
        expected = batch_size * flop / (538_000_000 + batch_size * 128 * 46_080)
        assert own["none"][1] == pytest.approx(expected)


def test_a_machine_without_a_measured_bandwidth_is_said_to_have_no_roofline(point: Point) -> None:
    assert why_no_roofline([point]) == []
    assert point.records.machine is not None
    blind = replace(point.records.machine, read_bandwidth_bytes_per_s=None)
    without = replace(point, records=replace(point.records, machine=blind))
    assert roofline(without, looks_of(point)) is None
    assert why_no_roofline([without]) == [
        "There is no roofline: the read bandwidth that it needs is measured on CPUs only."
    ]


def test_times_that_fall_are_not_called_rising(point: Point) -> None:
    picture = verify_cost(point, looks_of(point))
    assert picture is not None
    assert picture.text.startswith("A rising curve")
    assert not picture.findings
    assert point.records.machine is not None
    times = [
        {**row, "runner_s": 0.01 if row["rows"] == 8 else row["runner_s"]} for row in point.records.machine.step_times
    ]
    noisy = replace(point, records=replace(point.records, machine=replace(point.records.machine, step_times=times)))
    picture = verify_cost(noisy, looks_of(point))
    assert picture is not None
    assert "rising" not in picture.text
    assert picture.findings == ["t(8) is below t(4): the measurement is noisy there."]


def test_another_points_machine_is_used_only_if_it_is_the_same(tmp_path: Path) -> None:
    small = {"variants": tuple(VARIANTS[:3]), "repeats": 1}
    runs = [
        write_point(tmp_path / "a", Made("a", **small)),
        write_point(tmp_path / "b", Made("b", with_machine=False, **small)),
    ]
    runs.append(write_point(tmp_path / "c", Made("c", with_machine=False, **small), {"num_threads": 7}))
    a, b, c = gather(runs).points
    assert machine_of(b, [a, b, c]) is a.records.machine
    assert machine_of(c, [a, b, c]) is None


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([1.5, 1.2, 1.1], "pays at any batch_size from 1 to 4"),
        ([0.5, 0.2, 1.0], "does not pay at any batch_size from 1 to 4"),
        ([1.5, 1.2, 0.8], "pays up to batch_size 2, no longer at 4 (passes 1.0 near 3)"),
        ([0.5, 1.5, 1.6], "pays from batch_size 2 on, not yet at 1 (passes 1.0 near 1.5)"),
        ([1.5, 0.5, 1.5], "pays at batch_size 1, 4 and not between (passes 1.0 near 1.5, 3)"),
    ],
)
def test_where_a_drafter_pays_is_said_in_words(speeds: list[float], expected: str) -> None:
    assert where_it_pays("batch_size", [1, 2, 4], speeds) == expected


def test_crossings_do_not_depend_on_the_order() -> None:
    assert crossings([4, 1, 2], [0.8, 1.5, 1.2]) == pytest.approx([3.0])


def test_rings_lie_on_the_lines_and_have_the_number_of_the_text(tmp_path: Path) -> None:
    """Over a logarithmic axis the line between 4 and 16 passes 1.0 at 8, not halfway between the numbers."""
    for size in (4, 16):
        made = Made(str(size), size, overrides={"batch_size": size}, repeats=1, num_cases=16, num_tokens=8)
        write_point(tmp_path / str(size), replace(made, variants=(VARIANTS[0], VARIANTS[2])))
    points = gather([tmp_path]).points
    for point, middle in zip(points, (1.3, 0.7), strict=True):
        point.summary["speedups"][0]["decode"] |= {"median": middle, "low": None, "high": None}
    (picture,) = sweeps(points, looks_of(*points))
    assert "(passes 1.0 near 8)" in picture.findings[0]
    (axes,) = picture.figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    (ring,) = (line for line in axes.lines if line.get_markerfacecolor() == "none")
    assert ring.get_xdata() == pytest.approx([8])
    (curve,) = (line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata()) == 2)
    (x0, y0), (x1, y1) = axes.transData.transform(curve.get_xydata())
    x, y = axes.transData.transform((ring.get_xdata()[0], 1.0))
    assert (x - x0) / (x1 - x0) == pytest.approx((y - y0) / (y1 - y0))


def test_every_number_that_differs_is_a_figure_with_a_panel_for_the_others(tmp_path: Path) -> None:
    points = gather([write_sweep(tmp_path / "run", num_tokens=16, variants=tuple(VARIANTS[:4]))]).points
    pictures = {picture.title: picture for picture in sweeps(points, looks_of(*points))}
    assert list(pictures) == ["Speedup against batch_size", "Speedup against engine.max_draft_tokens"]
    batch = pictures["Speedup against batch_size"]
    assert {row[0] for row in batch.rows} == {"engine.max_draft_tokens=2", "engine.max_draft_tokens=6"}
    assert {row[1] for row in batch.rows} == {"ngram", "draft_model"}
    assert len(batch.rows) == 2 * 2 * 4
    assert re.match("engine.max_draft_tokens=6: ngram pays up to batch_size .* draft_model pays", batch.findings[1])


def test_runs_that_measured_the_same_are_kept_apart(tmp_path: Path) -> None:
    runs = [
        write_point(
            tmp_path / run / str(size),
            Made(f"{run}{size}", size, overrides={"batch_size": size}, variants=tuple(VARIANTS[:3]), repeats=1),
        )
        for run in "ab"
        for size in (1, 2)
    ]
    points = gather([tmp_path / "a", tmp_path / "b"]).points
    assert len(points) == len(runs)
    (picture,) = sweeps(points, looks_of(*points))
    assert len({row[0] for row in picture.rows}) == 2


def test_too_many_combinations_are_cut_and_said(tmp_path: Path) -> None:
    for number in range(MOST_PANELS + 1):
        for size in (1, 2):
            made = Made(f"{number}-{size}", size, overrides={"batch_size": size, "prompts": f"set{number}"})
            made = replace(made, repeats=1, num_cases=2, num_tokens=8, variants=tuple(VARIANTS[:3]))
            write_point(tmp_path / f"{number}-{size}", made)
    points = gather([tmp_path]).points
    (picture,) = sweeps(points, looks_of(*points))
    assert len({row[0] for row in picture.rows}) == MOST_PANELS
    assert any("8 of 9 combinations" in note and "Not drawn: prompts=set8." in note for note in picture.notes)


def test_numbers_that_are_equal_are_one_setting(tmp_path: Path) -> None:
    for size, temperature in ((1, 0), (2, 0.0)):
        made = Made(str(size), size, overrides={"batch_size": size, "temperature": temperature})
        write_point(tmp_path / str(size), replace(made, repeats=1, num_cases=2, variants=tuple(VARIANTS[:3])))
    points = gather([tmp_path]).points
    (picture,) = sweeps(points, looks_of(*points))
    assert {row[0] for row in picture.rows} == {""}


def test_the_legend_has_the_variants_of_all_panels(tmp_path: Path) -> None:
    for k, other in ((1, 2), (2, 3)):
        for size in (1, 2):
            made = Made(f"{k}-{size}", size, overrides={"batch_size": size, "k": k}, repeats=1, num_cases=2)
            write_point(tmp_path / made.name, replace(made, variants=(VARIANTS[0], VARIANTS[other])))
    points = gather([tmp_path]).points
    picture = sweeps(points, looks_of(*points))[0]
    (legend,) = picture.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ngram", "draft_model"]


def test_without_intervals_nothing_is_clear_and_everything_is_drawn(tmp_path: Path) -> None:
    for size in (1, 2):
        made = Made(str(size), size, overrides={"batch_size": size}, repeats=1, num_cases=size)
        write_point(tmp_path / str(size), replace(made, variants=tuple(VARIANTS[:3])))
    points = gather([tmp_path]).points
    ratio = points[0].speedup("ngram")
    assert ratio is not None
    assert ratio["low"] is None
    (picture,) = sweeps(points, looks_of(*points))
    said = "not clear at 1, 2, where there is no interval (it takes 6 conversations, 12 prompts)."
    assert said in picture.findings[0]
    for build in BUILDERS:
        build(points[0], looks_of(*points))
    assert predictions(points, looks_of(*points)) is not None


def test_names_break_behind_an_underscore() -> None:
    assert folded(["transformers_assisted", "token_recycling", "multi-turn conversation"]) == [
        "transformers_\nassisted",
        "token_recycling",
        "multi-turn\nconversation",
    ]
