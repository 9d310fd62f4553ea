"""Writes a report: index.html, and each figure as PNG and CSV beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from specdec.errors import InputError
from specdec.eval.atomic import write_bytes
from specdec.eval.records import CONTROL
from specdec.eval.report import tables
from specdec.eval.report.acceptance_figures import acceptance_by_category, acceptance_by_position
from specdec.eval.report.drawing import Picture, csv_of
from specdec.eval.report.gather import ODD, Gathered, Point
from specdec.eval.report.looks import Looks
from specdec.eval.report.machine_figures import predictions, roofline, verify_cost, why_no_roofline
from specdec.eval.report.speed_figures import speedups, speedups_by_category
from specdec.eval.report.sweep_figures import sweeps
from specdec.eval.report.time_figures import between_tokens, first_token, time_split

PAGE_FILE, FIGURES_FILE, LIST_FILE = "index.html", "figures.csv", "report-files.txt"
MOST_POINTS_DRAWN = 4  # one by one; the figures over all points have them all

_OWN_FILE = re.compile(r"[\w-]+\.(png|csv)")  # names of figures: no list makes anything else ours
_MACHINE = "Cost of verification"
Builder = Callable[[Point, Looks], Picture | None]
_TOPICS: dict[str, tuple[Builder, ...]] = {
    "Speedup": (speedups, speedups_by_category),
    "Acceptance": (acceptance_by_category, acceptance_by_position),
    "Time": (time_split, first_token, between_tokens),
    _MACHINE: (verify_cost, roofline),
}


@dataclass(frozen=True, slots=True)
class _Section:
    title: str
    pictures: list[Picture]
    notes: list[str]
    is_by_point: bool = True

    @property
    def key(self) -> str:
        return "section-" + self.title.lower().replace(" ", "-")


@dataclass(slots=True)
class _Figures:
    """All figures of a report, drawn."""

    sections: list[_Section] = field(default_factory=list)
    svgs: dict[str, Markup] = field(default_factory=dict)  # by key of the picture
    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, drawn: Sequence[_Drawn]) -> None:
        for own in drawn:
            key = own.picture.key
            self.svgs[key] = own.svg
            self.files |= {f"{key}.png": own.png, f"{key}.csv": own.picture.csv.encode()}


@dataclass(frozen=True, slots=True)
class _Drawn:
    picture: Picture
    svg: Markup  # escaped where it is made
    png: bytes

    @classmethod
    def of(cls, picture: Picture) -> _Drawn:
        return cls(picture, Markup(picture.svg), picture.png)


def write_report(found: Gathered, folder: Path) -> Path:
    """Write the report of what was gathered into a folder, made if absent, and return the path of the page.

    Files of an earlier report that this one does not have are removed; points whose figures fail are moved to
    `found.unused`.

    Raises:
        InputError: the folder cannot be written, or no point has figures.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before the drawing takes its time
        return _write_report(found, folder)
    except OSError as error:
        raise InputError(f"report {str(folder)!r} cannot be written: {error}; give another folder") from error


def _write_report(found: Gathered, folder: Path) -> Path:
    figures = _draw(found)
    contents: dict[str, bytes] = {FIGURES_FILE: csv_of(tables.FIGURES, tables.figures(found.points)).encode()}
    contents |= figures.files
    contents[PAGE_FILE] = _page(found, figures).encode()  # last: who sees it sees what it links to
    earlier = _listed(folder)
    _write_list(folder, earlier | contents.keys())
    for name, content in contents.items():
        write_bytes(folder / name, content)
    for name in earlier - contents.keys():
        (folder / name).unlink(missing_ok=True)
    _write_list(folder, set(contents))
    return folder / PAGE_FILE


def _listed(folder: Path) -> set[str]:
    """Return the figures' files that an earlier report says it made there."""
    try:
        names = (folder / LIST_FILE).read_text(encoding="utf-8").split()
    except (OSError, UnicodeError):
        return set()
    return {name for name in names if _OWN_FILE.fullmatch(name)}


def _write_list(folder: Path, names: Collection[str]) -> None:
    write_bytes(folder / LIST_FILE, "".join(f"{name}\n" for name in sorted(names)).encode())


def _draw(found: Gathered) -> _Figures:
    """Draw all figures; a point whose figures fail is dropped."""
    looks = Looks(info.name for point in found.points for info in point.variants)
    figures = _Figures()
    pictures: dict[Builder, list[Picture]] = {build: [] for builders in _TOPICS.values() for build in builders}
    numbered = list(enumerate(found.points, 1))
    for number, point in sorted(numbered, key=lambda pair: _telling(found.points).index(pair[1])):
        wanted = [build for build, own in pictures.items() if len(own) < MOST_POINTS_DRAWN]
        try:
            _try_tables(point)
            built = {build: build(point, looks) for build in wanted}
            drawn = {build: _Drawn.of(_named(one, point, number, numbered)) for build, one in built.items() if one}
        except ODD as error:
            found.drop(point, f"its figures cannot be made: {type(error).__name__}: {error}")
            continue
        figures.add(list(drawn.values()))
        for build, one in drawn.items():
            pictures[build].append(one.picture)
    swept = _over_points(found, figures, "the sweep", lambda: sweeps(found.points, looks))
    figures.sections += [_Section("What the sweep shows", swept, [], is_by_point=False)] if swept else []
    for title, builders in _TOPICS.items():
        own = [picture for build in builders for picture in pictures[build]]
        notes: list[str] = []
        if title == _MACHINE:
            own += _over_points(found, figures, "predicted speedups", lambda: [predictions(found.points, looks)])
            notes = why_no_roofline(found.points)
        figures.sections += [_Section(title, own, notes)] if own else []
    return figures


def _telling(points: Sequence[Point]) -> list[Point]:
    """Return the points, those first in which a drafter is fastest: there is no room to draw all one by one."""
    best: dict[str, tuple[float, int]] = {}
    for i, point in enumerate(points):
        for entry in point.summary["speedups"]:
            name, ratio = entry["variant"], entry["decode"]
            if name != CONTROL and ratio is not None:
                best[name] = max(best.get(name, (0.0, 0)), (ratio["median"], -i))
    chosen = {-i for _, i in sorted(best.values(), reverse=True)}
    return sorted(points, key=lambda point: points.index(point) not in chosen)


def _named(picture: Picture, point: Point, number: int, points: Sequence[object]) -> Picture:
    """Return a picture of a point by its number, and named where there are several."""
    if len(points) == 1:
        return picture
    return replace(picture, key=f"{picture.key}-{number}", title=f"{picture.title}: {point.label}")


def _try_tables(point: Point) -> None:
    """Make all that the page says of a point, so that what fails does so before the page is begun."""
    one = [point]
    for make in (tables.headline, tables.variants, tables.figures, tables.controls, tables.notes, tables.left_out):
        make(one)
    tables.settings(one)
    tables.origins(one)
    tables.short_headline(point)


def _over_points(
    found: Gathered, figures: _Figures, what: str, build: Callable[[], Sequence[Picture | None]]
) -> list[Picture]:
    """Return the figures over all points; where they fail the reader is warned."""
    try:
        drawn = [_Drawn.of(picture) for picture in build() if picture is not None]
    except ODD as error:
        found.not_drawn.append(f"Figures of {what} cannot be made: {type(error).__name__}: {error}.")
        return []
    figures.add(drawn)
    return [one.picture for one in drawn]


def _page(found: Gathered, figures: _Figures) -> str:
    points = found.points
    questions = list(dict.fromkeys(p.records.header.question for p in points if p.records.header.question))
    here = files("specdec.eval.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(here.joinpath("template.html").read_text(encoding="utf-8"))
    left_out = tables.left_out(points)
    return template.render(
        title=" ".join(questions) or "What drafting buys: a report of specdec",
        is_question=bool(questions),
        style=Markup(here.joinpath("style.css").read_text(encoding="utf-8")),  # our own file
        points=points,
        warnings=found.warnings,
        headline=tables.headline(points),
        variants=tables.variants(points),
        controls=tables.controls(points),
        notes=tables.notes(points),
        sections=figures.sections,
        svgs=figures.svgs,
        data=lambda picture: tables.data(picture.columns, picture.rows, f"Numbers of the figure: {picture.title}"),
        not_drawn=_telling(points)[MOST_POINTS_DRAWN:],
        most_drawn=MOST_POINTS_DRAWN,
        unused=tables.unused(found) if found.unused else None,
        left_out=left_out if left_out.rows else None,
        settings=tables.settings(points),
        origins=tables.origins(points),
        figures_file=FIGURES_FILE,
        list_file=LIST_FILE,
    )
