"""`specdec eval NAME`: the measurements of `specdec.eval`, each as `python -m specdec.eval.NAME` would run it."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import resources
from typing import Annotated

import typer
from rich.table import Table

from specdec.cli.console import ending_with_a_status, output, say
from specdec.errors import ConfigError

_FOLDER, _PACKAGE = "eval", "specdec.eval"
# Everything behind the name is the measurement's own, --help included.
UNTOUCHED = {"allow_interspersed_args": False}


def eval_command(
    name: Annotated[
        str | None,
        typer.Argument(help="One of those listed without it.", autocompletion=lambda incomplete: completed(incomplete)),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OVERRIDE]...",
            help="group=member, group.setting=value, -m for a sweep; --cfg job shows all settings.",
        ),
    ] = None,
) -> None:
    """Measure: acceptance, speedup, whether output is lossless, and more; without a name, list what there is.

    The same as python -m specdec.eval.NAME.
    """
    with ending_with_a_status():
        found = dict(measurements())
        if name is None:
            _show(found)
            return
        if name not in found:
            close = get_close_matches(name, found, n=1)
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"there is no measurement {name!r};{hint} available: {', '.join(found)}")
        words, sys.argv = sys.argv, [f"{_PACKAGE}.{name}", *(overrides or [])]
        try:
            runpy.run_module(f"{_PACKAGE}.{name}", run_name="__main__", alter_sys=True)
        finally:
            sys.argv = words


def measurements() -> Iterator[tuple[str, str]]:
    """Yield the name and the first line of the docstring of every module of specdec.eval that can be run.

    None is imported, so that a list costs no torch.
    """
    files = resources.files("specdec") / _FOLDER
    for file in sorted(files.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            source = file.read_text(encoding="utf-8")
            if 'if __name__ == "__main__":' in source:
                yield file.name.removesuffix(".py"), (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def completed(incomplete: str) -> list[str]:
    """Return the names of measurements that `incomplete` begins."""
    return [name for name, _ in measurements() if name.startswith(incomplete)]


def _show(found: dict[str, str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, line in found.items():
        table.add_row(name, line)
    out = output()
    out.print(table)
    say("specdec eval NAME --cfg job shows the settings of one; docs/configs.md says how to change them", console=out)
