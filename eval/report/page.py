"""Writes a report: index.html, and each figure as PNG and CSV beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from specdec.errors import InputError
from specdec.eval.report import tables
from specdec.eval.report.acceptance_figures import acceptance_by_category, acceptance_by_position
from specdec.eval.report.drawing import Picture, csv_of
from specdec.eval.report.gather import Gathered, Point
from specdec.eval.report.looks import Looks
from specdec.eval.report.machine_figures import predictions, roofline, verify_cost
from specdec.eval.report.speed_figures import speedups, speedups_by_category
from specdec.eval.report.sweep_figures import sweeps
from specdec.eval.report.time_figures import between_tokens, first_token, time_split

PAGE_FILE, FIGURES_FILE = "index.html", "figures.csv"
MOST_POINTS_DRAWN = 4  # one by one; the figures over all points have them all

Builder = Callable[[Point, Looks], Picture | None]
_TOPICS: dict[str, tuple[Builder, ...]] = {
    "Speedup": (speedups, speedups_by_category),
    "Acceptance": (acceptance_by_category, acceptance_by_position),
    "Time": (time_split, first_token, between_tokens),
    "Cost of verification": (verify_cost, roofline),
}


@dataclass(frozen=True, slots=True)
class _Section:
    title: str
    pictures: list[Picture]
    is_by_point: bool = True

    @property
    def key(self) -> str:
        return "section-" + self.title.lower().replace(" ", "-")


def write_report(found: Gathered, folder: Path) -> Path:
    """Write the report of what was gathered into a folder, made if absent, and return the path of the page.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before the drawing takes its time
        return _write_report(found, folder)
    except OSError as error:
        raise InputError(f"report {str(folder)!r} cannot be written: {error}; give another folder") from error


def _write_report(found: Gathered, folder: Path) -> Path:
    sections = _sections(found.points)
    pictures = [picture for section in sections for picture in section.pictures]
    contents: dict[str, bytes] = {FIGURES_FILE: csv_of(tables.FIGURES, tables.figures(found.points)).encode()}
    for picture in pictures:
        contents[f"{picture.key}.png"] = picture.png
        contents[f"{picture.key}.csv"] = picture.csv.encode()
    contents[PAGE_FILE] = _page(found, sections).encode()  # last: who sees it sees what it links to
    for name, content in contents.items():
        _write(folder / name, content)
    return folder / PAGE_FILE


def _write(path: Path, content: bytes) -> None:
    half = path.with_name(f".{path.name}.half")
    try:
        half.write_bytes(content)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def _sections(points: Sequence[Point]) -> list[_Section]:
    """Return the figures by topic; those over all points first."""
    looks = Looks(info.name for point in points for info in point.variants)
    swept = sweeps(points, looks)
    sections = [_Section("What the sweep shows", swept, is_by_point=False)] if swept else []
    for title, builders in _TOPICS.items():
        pictures = [picture for build in builders for picture in _each(build, points, looks)]
        if title == "Cost of verification":
            predicted = predictions(points, looks)
            pictures += [predicted] if predicted else []
        if pictures:
            sections.append(_Section(title, pictures))
    return sections


def _each(build: Builder, points: Sequence[Point], looks: Looks) -> list[Picture]:
    """Return the picture of each of the first points that have one; the points are named where there are several."""
    found: list[Picture] = []
    for number, point in enumerate(points, 1):
        picture = build(point, looks) if len(found) < MOST_POINTS_DRAWN else None
        if picture is not None and len(points) > 1:
            picture = replace(picture, key=f"{picture.key}-{number}", title=f"{picture.title}: {point.label}")
        found += [] if picture is None else [picture]
    return found


def _page(found: Gathered, sections: Sequence[_Section]) -> str:
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
        controls=tables.controls(points),
        notes=tables.notes(points),
        sections=sections,
        svg=lambda picture: Markup(picture.svg),  # escaped where it is made
        data=lambda picture: tables.data(picture.columns, picture.rows, f"Numbers of the figure: {picture.title}"),
        not_drawn=points[MOST_POINTS_DRAWN:],
        most_drawn=MOST_POINTS_DRAWN,
        unused=tables.unused(found) if found.unused else None,
        left_out=left_out if left_out.rows else None,
        settings=tables.settings(points),
        origins=tables.origins(points),
        figures_file=FIGURES_FILE,
    )
