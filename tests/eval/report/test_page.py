from __future__ import annotations

import csv
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from specdec.eval.records import VariantInfo
from specdec.eval.report.drawing import _ROLES
from specdec.eval.report.gather import gather
from specdec.eval.report.page import LIST_FILE, MOST_POINTS_DRAWN, write_report
from specdec.eval.report.tables import controls, headline, notes, variants
from specdec.eval.report.time_figures import _PARTS
from tests.browser import DESK, PHONE, OpenPage
from tests.eval.report.made_up import VARIANTS, Made, write_point

TAB, ENTER = "\ue004", "\ue007"
STYLE = (Path(__file__).resolve().parents[3] / "eval/report/style.css").read_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["point_page", "sweep_page"])
def test_it_fits_asks_for_nothing_and_complains_about_nothing(
    open_page: OpenPage, request: pytest.FixtureRequest, name: str, width: int, dark: bool
) -> None:
    path = request.getfixturevalue(name)
    page = open_page(path, width, dark)
    page.js("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert page.overflow() <= 0
    assert page.messages() == []
    assert page.requests() == [path.as_uri()]
    inside = page.js(
        "return [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    )
    assert inside > 0 or width == DESK  # wide tables scroll in their box


def test_the_colours_follow_the_scheme_in_text_and_figures(open_page: OpenPage, point_page: Path) -> None:
    script = """
        const colour = (where, what) => getComputedStyle(document.querySelector(where))[what];
        return [colour('body', 'backgroundColor'), colour('body', 'color'), colour('svg text', 'fill')]"""
    light, dark = (open_page(point_page, DESK, scheme).js(script) for scheme in (False, True))
    assert light[0] == "rgb(254, 254, 254)"
    assert dark[0] == "rgb(22, 24, 28)"
    assert light[1] == light[2] != dark[1] == dark[2]


def test_landmarks_headings_tables_and_figures_can_be_read_without_seeing(
    open_page: OpenPage, sweep_page: Path
) -> None:
    page = open_page(sweep_page)
    for landmark in ("header", "nav[aria-label]", "main#main", "footer"):
        assert page.js("return document.querySelectorAll(arguments[0]).length", f"body > {landmark}") == 1
    levels = page.js("return [...document.querySelectorAll('h1, h2, h3, h4')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = page.js("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    missing = """
        const all = (what) => [...document.querySelectorAll(what)];
        const named = (e) => e.getAttribute('aria-labelledby').split(' ').every(i => document.getElementById(i));
        return {
            tables: all('table').filter(t => !t.caption || [...t.querySelectorAll('th')].some(h => !h.scope)).length,
            images: all('figure svg').filter(s => s.getAttribute('role') !== 'img' || !named(s)).length,
            figures: all('article').filter(a => !a.querySelector('details table')).length,
            links: all('a[href^="#"]').filter(a => !document.getElementById(a.hash.slice(1))).length,
            boxes: all('.scroll').filter(e => e.tabIndex !== 0 || !e.getAttribute('aria-label')).length,
        }"""
    assert page.js(missing) == dict.fromkeys(("tables", "images", "figures", "links", "boxes"), 0)
    assert page.js("return document.querySelectorAll('figure svg').length") > 10


def test_the_keyboard_skips_to_the_figures_and_sees_where_it_is(open_page: OpenPage, point_page: Path) -> None:
    page = open_page(point_page, PHONE)
    page.press(TAB)
    assert page.js("return document.activeElement.className") == "skip"
    assert page.js("return document.activeElement.getBoundingClientRect().left") >= 0
    page.press(ENTER)
    assert page.js("return document.activeElement.id") == "main"
    page.press(TAB)
    assert page.js("return document.activeElement.className") == "scroll"
    assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_links_lead_to_files_beside_the_page(point_page: Path) -> None:
    links = re.findall(r'href="([^"#:]+)"', point_page.read_text())
    assert len(links) == len(set(links)) > 20
    assert all((point_page.parent / link).is_file() for link in links)
    written = {path.name for path in point_page.parent.iterdir()}
    assert written == {*links, "index.html"}


def test_files_that_an_earlier_report_made_are_removed_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    small = Made(repeats=1, num_tokens=8, num_cases=2, variants=(VARIANTS[0], VARIANTS[2]))
    runs = [write_point(tmp_path / name, replace(small, name=name)) for name in ("a", "b")]
    write_report(gather(runs), folder)
    (folder / "mine.png").write_text("mine")
    (tmp_path / "mine.csv").write_text("mine")
    with (folder / LIST_FILE).open("a") as file:
        file.write("../mine.csv\nnotes.txt\n")
    (folder / "notes.txt").write_text("mine")
    assert (folder / "speedup-2.png").is_file()
    write_report(gather(runs[:1]), folder)
    assert not list(folder.glob("speedup-[0-9]*"))
    assert (folder / "speedup.png").is_file()
    assert {path.name for path in folder.iterdir()} - set((folder / LIST_FILE).read_text().split()) == {
        *("mine.png", "notes.txt", LIST_FILE)
    }
    assert (tmp_path / "mine.csv").is_file()


@pytest.mark.parametrize(
    ("temperature", "seed", "expected"), [(0.0, None, "2 of 2"), (0.8, 1, "2 of 2"), (0.8, None, "-")]
)
def test_equal_answers_are_only_told_where_they_should_be(
    tmp_path: Path, temperature: float, seed: int | None, expected: str
) -> None:
    made = Made(
        repeats=1,
        num_tokens=8,
        num_cases=2,
        temperature=temperature,
        seed=seed,
        variants=(VARIANTS[0], VARIANTS[2], VARIANTS[6]),
    )
    points = gather([write_point(tmp_path / "run", made)]).points
    table = headline(points)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["ngram"]["answers equal to none's"] == expected
    assert rows["llama_cpp"]["answers equal to none's"] == ("-" if temperature else "2 of 2")
    assert any("without a seed" in note and "ngram; llama_cpp" in note for note in notes(points)) == (expected == "-")


def test_notes_are_said_once_and_peers_that_do_not_fit_are_absent(tmp_path: Path) -> None:
    points = gather([write_point(tmp_path / "run", Made(repeats=1, num_tokens=12, num_cases=2))]).points
    points[0].summary["variants"]["none"]["num_loops"] = points[0].summary["variants"]["ngram"]["num_loops"] = 1
    said = notes(points)
    assert "Absent: openvino (pip install openvino-genai)." in said
    assert [line for line in said if "repeat" in line] == [
        "run: answers that repeat themselves: none 1 of 2; ngram 1 of 2."
    ]


def test_too_few_batches_are_said_and_not_judged(tmp_path: Path) -> None:
    points = gather([write_point(tmp_path / "run", Made(repeats=1, num_tokens=12, num_cases=1))]).points
    table = headline(points)
    assert next(row for row in table.rows if row[0] == "ngram")[1].endswith(" [-]")
    (line,) = controls(points)
    assert "too few prompts for an interval, which takes 8 conversations" in line
    assert "NOT" not in line
    assert "[-]: a 95 % interval takes 6 conversations, 1 conversation gave none: run." in notes(points)


def test_how_many_prompts_give_an_interval_is_said_of_batches(tmp_path: Path) -> None:
    made = Made(batch_size=8, repeats=1, num_tokens=12, num_cases=32, variants=(VARIANTS[0], VARIANTS[2]))
    for name in ("a", "b"):
        write_point(tmp_path / name, replace(made, name=name))
    assert notes(gather([tmp_path]).points) == [
        "Absent: openvino (pip install openvino-genai).",
        "[-]: a 95 % interval takes 48 prompts, 4 full batches gave none: a; b.",
    ]


def test_captions_can_be_read_on_a_phone(open_page: OpenPage, point_page: Path) -> None:
    page = open_page(point_page, PHONE)
    page.js("document.querySelectorAll('details').forEach(each => { each.open = true })")
    edges = page.js("return [...document.querySelectorAll('caption span')].map(e => e.getBoundingClientRect().right)")
    assert len(edges) > 5
    assert max(edges) <= PHONE


def test_text_of_records_is_never_markup(tmp_path: Path) -> None:
    odd = replace(VARIANTS[2], name="<script>alert(1)</script>", note="<img src=x>")
    made = Made(variants=(VARIANTS[0], odd), question="<i>Why</i> & how?", repeats=1)
    page = write_report(gather([write_point(tmp_path / "run", made)]), tmp_path / "report").read_text()
    assert "&lt;i&gt;Why&lt;/i&gt; &amp; how?" in page
    assert not re.search(r"<(script|img|i)\b", page)


def test_the_headline_keeps_rates_of_trees_apart_and_marks_lossy_variants(point_page: Path, tmp_path: Path) -> None:
    table = headline(gather([write_point(tmp_path / "run")]).points)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == ["none", "control", "ngram", "draft_model", "eagle3", "typical (LOSSY)", "llama_cpp"]
    assert rows["eagle3"]["acceptance rate"] == rows["ngram"]["rate of tree nodes"] == "-"
    assert float(rows["eagle3"]["rate of tree nodes"]) > 0
    assert float(rows["ngram"]["acceptance rate"]) > 0
    assert rows["typical (LOSSY)"]["output"] == "LOSSY"
    assert rows["typical (LOSSY)"]["answers equal to none's"] == "0 of 20"
    assert rows["ngram"]["answers equal to none's"] == "20 of 20"
    assert rows["ngram"]["output"] == "lossless"
    assert rows["llama_cpp"]["output"] == "peer"
    text = point_page.read_text()
    for expected in ("Does drafting pay", "0123456789ab", "--multirun", "transformers 5.23.0", "openvino", "Q8_0"):
        assert expected in text


def test_what_each_variant_is_is_said_once(tmp_path: Path, point_page: Path) -> None:
    options = {"drafter_options": {"tree": "chain"}, "verifier_options": {"epsilon": 0.3}, "max_draft_tokens": 2}
    medusa = VariantInfo("heads", "engine", "medusa", "typical", False, 2, {**options, "kv_dtype": "int8"})
    made = Made(repeats=1, num_tokens=12, num_cases=2, variants=(VARIANTS[0], VARIANTS[4], medusa, VARIANTS[6]))
    for name, count in (("a", 2), ("b", 2), ("c", 6)):
        write_point(tmp_path / name, replace(made, name=name, draft_tokens=count))
    points = gather([tmp_path]).points
    table = variants(points)
    heads = ("tree=chain, verifier.epsilon=0.3, kv_dtype=int8", "medusa", "typical")
    assert table.columns == ("variant", "draft tokens", "options", "drafter", "verifier", "points")
    assert table.rows == [
        ("none", "-", "-", "none", "-", "all"),
        ("eagle3", "2", "-", "eagle3", "traversal", "a; b"),
        ("eagle3", "6", "-", "eagle3", "traversal", "c"),
        ("heads (LOSSY)", "2", *heads, "a; b"),
        ("heads (LOSSY)", "6", *heads, "c"),
        ("llama_cpp", "-", "-", "-", "-", "all"),
    ]
    assert "points" not in variants(points[:2]).columns
    assert "What the variants are" in point_page.read_text()


def test_a_large_sweep_is_cut_and_the_csv_has_it_all(sweep_page: Path) -> None:
    assert len(list(sweep_page.parent.glob("speedup-?.png"))) == MOST_POINTS_DRAWN
    assert f"those of {MOST_POINTS_DRAWN} of them" in sweep_page.read_text()
    with (sweep_page.parent / "figures.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["point"] for row in rows}) == 8
    assert len(rows) == 8 * len(VARIANTS)


def _contrast(one: str, other: str) -> float:
    """Return the contrast of two colours. Source: WCAG 2.2, relative luminance."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted((light(one), light(other)))
    return (b + 0.05) / (a + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_the_page(scheme: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme]))
    for name, colour in colours.items():
        if name in ("ink", "muted", "link"):
            assert _contrast(colour, colours["page"]) >= 4.5, name
        elif name.startswith("series"):
            assert _contrast(colour, colours["page"]) >= 3, name
    assert _contrast(colours["ink"], colours["warning"]) >= 4.5
    for name, *own in _PARTS.values():  # of bars: the colour or its edge
        shown = [colours[_ROLES[colour].removeprefix("var(--").removesuffix(")")] for colour in own]
        assert max(_contrast(colour, colours["page"]) for colour in shown) >= 3, name
