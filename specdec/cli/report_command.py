"""`specdec report`: measured points as one page with its figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from specdec.cli.console import ending_with_a_status, messages, output, plain, say

if TYPE_CHECKING:
    from specdec.eval.report.gather import Point

_MOST_SHOWN = 8  # points in the terminal


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Folders of points, or of sweeps with points anywhere below."),
    ],
    output_folder: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Where to write.", show_default="`report` in the first of RUNS"
        ),
    ] = None,
) -> None:
    """Turn what an evaluation left behind into one HTML page with PNG and CSV files beside it."""
    with ending_with_a_status():
        from specdec.eval.report.gather import gather, text_of  # matplotlib and torch take seconds
        from specdec.eval.report.page import write_report

        found = gather(runs)
        with messages().status("drawing"):
            page = write_report(found, output_folder or runs[0] / "report")
        for warning in found.warnings:  # after the drawing, which may find a point that cannot be used
            say(f"warning: {warning}", style="yellow")
        for entry in found.unused:
            say(f"not used: {text_of(entry.folder)}: {entry.reason}", style="yellow")
        console = output()
        for point in found.points[:_MOST_SHOWN]:
            console.print(_shown(point))
        if len(found.points) > _MOST_SHOWN:
            say(f"{len(found.points) - _MOST_SHOWN} more points are on the page", console=console)
        say(str(page), style="bold", console=console)


def _shown(point: Point) -> Table:
    """Return the headline of a point, as wide as a narrow terminal."""
    from specdec.eval.report.tables import short_headline

    content = short_headline(point)
    table = Table(
        title=Text(plain(content.caption)),
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for number, column in enumerate(content.columns):
        is_text = number < content.num_text_columns
        table.add_column(
            Text(plain(column)), justify="left" if is_text else "right", overflow="fold", no_wrap=number == 1
        )
    for row in content.rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table
