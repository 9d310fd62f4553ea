"""`specdec trace FILE`: a page on which a traced generation can be read token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.console import ending_with_a_status, output, plain
from specdec.errors import InputError


def trace_command(
    file: Annotated[Path, typer.Argument(help="What SPECDEC_TRACE=FILE wrote while something was generated.")],
    to: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page.", show_default="FILE with .html in place of its ending"),
    ] = None,
    request: Annotated[int | None, typer.Option(metavar="ID", help="Only this request.", show_default=False)] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Only this run of the file: its number, from 1, or its id.", show_default=False
        ),
    ] = None,
) -> None:
    """Write one HTML page on which a traced generation can be read token by token."""
    with ending_with_a_status():
        from specdec.eval.trace_page.build import trace_page

        source = file.expanduser()
        page = source.with_suffix(".html") if to is None else to.expanduser()
        if page.resolve() == source.resolve():
            raise InputError(f"the page {str(page)!r} would replace its trace; name another file with --output")
        text = trace_page(source, run, request)
        try:
            page.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"the page {str(page)!r} cannot be written ({error}); name a file in a directory that exists and may "
                "be written to with --output"
            ) from error
        output().print(f"wrote {plain(str(page))}; open it in a browser", soft_wrap=True, markup=False)
