"""The consoles of the command line, what may be printed there, and how a command ends."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from specdec.errors import SpecdecError

REFUSED, USER_ERROR, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141

_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tab and newline


def plain(text: str) -> str:
    """Return `text` without the control characters that a terminal would obey."""
    return text.translate(_CONTROL)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to `ending_with_a_status`; rich itself would end with status 1."""
        raise  # the BrokenPipeError that rich is handling


def output() -> Console:
    """Return the console of standard output."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" instead of failing
    return _Console(highlight=False)


def messages() -> Console:
    """Return the console of standard error: errors, warnings, progress."""
    return _Console(stderr=True, highlight=False)


def has_colours(console: Console) -> bool:
    """Tell whether colours are wanted: a terminal that has them, and no NO_COLOR."""
    return console.is_terminal and not console.no_color and console.color_system is not None


def say(text: str, style: str = "dim", console: Console | None = None) -> None:
    """Print one line, on standard error unless a console is given."""
    (console or messages()).print(Text(plain(text), style=style), soft_wrap=True)


def say_error(error: SpecdecError) -> None:
    """Print what was wrong as one red line."""
    say("error: " + " ".join(str(error).split()), style="red")


def write_json(value: dict[str, Any]) -> None:
    """Write one line of JSON to standard output. Infinite numbers, which JSON has not, become null."""
    sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def ending_with_a_status() -> Iterator[None]:
    """Turn what a user can change into one red line and status 2, Ctrl-C into 130 and a closed pipe into 141."""
    try:
        yield
        sys.stdout.flush()
    except SpecdecError as error:
        say_error(error)
        raise typer.Exit(USER_ERROR) from error
    except KeyboardInterrupt as error:
        say("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        _drop_output()
        raise typer.Exit(CLOSED_PIPE) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        say(f"error: there is no room to write to ({error}); make some", style="red")
        raise typer.Exit(USER_ERROR) from error


def _drop_output() -> None:
    """Send what Python still holds for standard output to nowhere, or it would complain when it ends."""
    with suppress(OSError, ValueError):  # no real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
