"""Text on its way to a terminal or a file."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from specdec.cli.console import has_colours, plain

# Told apart by most colour-blind readers, on dark and on light backgrounds.
DRAFTED, OWN = "green", "magenta"
_WIDE = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"  # scripts that may break a line at any character
_PARTS = re.compile(rf"\n| +|[{_WIDE}]|[^ \n{_WIDE}]+")


def show_legend(console: Console) -> None:
    """Say in one line what the colours mean."""
    console.print(f"[{DRAFTED}]drafted and accepted[/{DRAFTED}] [dim]|[/dim] [{OWN}]the target's own[/{OWN}]")


class Writer:
    """Writes text as it comes. A terminal gets whole words per line and no control characters, a file the text.

    On a terminal a word is held back until it is whole, and spaces until it is known whether they end a line.

    Args:
        console: where to.
        coloured: tell drafted text from the target's own by colour, if the console has colours.
    """

    def __init__(self, console: Console, coloured: bool = False) -> None:
        self._console = console
        colours = {True: DRAFTED, False: OWN} if coloured and has_colours(console) else {}
        self._styles = {drafted: Style.parse(colour) for drafted, colour in colours.items()}
        self._column = 0
        self._gap = ""  # spaces before the word
        self._word: list[tuple[str, bool]] = []
        self._is_spilled = False  # the word is longer than a line, and its beginning is written
        self._out: list[str] = []

    def write(self, text: str, drafted: bool = False) -> None:
        """Write text; `drafted` chooses its colour."""
        if not self._console.is_terminal:
            self._out.append(text)
        else:
            for part in _PARTS.findall(plain(text).replace("\t", "    ")):
                self._take(part, drafted)
        self._flush()

    def end(self) -> None:
        """Write what is held back, and a line break."""
        self._place()
        self._is_spilled = False
        self._break_line()
        self._flush()

    def _take(self, part: str, drafted: bool) -> None:
        if part[0] in " \n":
            self._place()
            self._is_spilled = False
            self._gap = self._gap + part if part[0] == " " else ""
            if part == "\n":
                self._break_line()
        elif self._is_spilled:
            self._put([(part, drafted)])
        elif re.match(f"[{_WIDE}]", part):
            self._place()
            self._word = [(part, drafted)]
            self._place()
        else:
            self._word.append((part, drafted))
            if _cells(self._word) > self._console.width:
                self._place()
                self._is_spilled = True

    def _place(self) -> None:
        """Write the word, on a new line if it does not fit on this one."""
        if not self._word:
            return
        if self._column and self._column + len(self._gap) + _cells(self._word) > self._console.width:
            self._break_line()
        else:
            self._out.append(self._gap)
            self._column += len(self._gap)
        self._gap = ""
        self._put(self._word)
        self._word = []

    def _put(self, parts: list[tuple[str, bool]]) -> None:
        self._out += [self._styled(text, drafted) for text, drafted in parts]
        # Where something is longer than a line the terminal breaks it, at exactly the edge.
        self._column = (self._column + _cells(parts) - 1) % self._console.width + 1

    def _break_line(self) -> None:
        self._out.append("\n")
        self._column, self._gap = 0, ""

    def _styled(self, text: str, drafted: bool) -> str:
        style = self._styles.get(drafted)
        return text if style is None else style.render(text, color_system=ColorSystem.STANDARD)

    def _flush(self) -> None:
        text = "".join(self._out)
        self._out.clear()
        if text:
            self._console.file.write(text)
            self._console.file.flush()


def _cells(parts: list[tuple[str, bool]]) -> int:
    return sum(cell_len(text) for text, _ in parts)
