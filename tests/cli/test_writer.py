"""Words arrive in pieces of any length and are broken at the right edge of a terminal."""

from __future__ import annotations

import io
import random
import re

import pytest
from rich.console import Console

from specdec.cli.writer import Writer
from tests.cli.running import without_colours


def write(pieces: list[str], *, is_terminal: bool = True, width: int = 20) -> str:
    file = io.StringIO()
    writer = Writer(Console(file=file, force_terminal=is_terminal, width=width))
    for piece in pieces:
        writer.write(piece)
    writer.end()
    return file.getvalue()


def coloured(spans: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    writer = Writer(Console(file=file, force_terminal=True, width=20), coloured=True)
    for text, drafted in spans:
        writer.write(text, drafted)
    writer.end()
    return file.getvalue()


class TestWrapping:
    def test_lines_fit_and_words_stay_whole(self) -> None:
        text = "the quick brown fox jumps over the lazy dog and runs away from all of them"
        for size in (1, 2, 3, 7, 100):
            shown = write([text[i : i + size] for i in range(0, len(text), size)])
            assert shown.split() == text.split()
            assert max(map(len, shown.splitlines())) <= 20
            assert shown.count("\n") == 4
            assert all(line == line.strip() for line in shown.splitlines())

    def test_pieces_do_not_matter(self) -> None:
        letters = random.Random(0)
        for _ in range(50):
            text = "".join(letters.choice("ab漢  \n\t") for _ in range(120))
            cuts = sorted(letters.sample(range(121), 8))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 120], strict=True)]
            assert write(pieces) == write([text])

    def test_line_breaks_and_indentation_stay(self) -> None:
        text = "def f(x):\n    return x\n\n\tprint(1)\n"
        assert write([text]) == text.replace("\t", "    ") + "\n"

    def test_line_of_exact_width(self) -> None:
        assert write(["abcdefghi abcdefghij ", "next\nx"]) == "abcdefghi abcdefghij\nnext\nx\n"

    def test_word_longer_than_a_line(self) -> None:
        assert write(["so ", "x" * 30 + " ", "end"]) == f"so\n{'x' * 30} end\n"
        assert write(["so ", *["x"] * 40, " end"]) == f"so\n{'x' * 40}\nend\n"

    def test_long_word_does_not_wait_for_its_end(self) -> None:
        file = io.StringIO()
        writer = Writer(Console(file=file, force_terminal=True, width=20))
        writer.write("x" * 21)
        assert file.getvalue() == "x" * 21
        writer.write("y")
        assert file.getvalue() == "x" * 21 + "y"

    def test_wide_characters(self) -> None:
        assert write(["漢字" * 2, "漢字" * 3, "漢"]) == "漢字漢字漢字漢字漢字\n漢\n"

    def test_control_characters(self) -> None:
        assert write(["a\x1b[31mb\x07\r\x9b c\x00\x7f"]) == "a[31mb c\n"

    def test_file_gets_the_text(self) -> None:
        text = "a" * 50 + " b" * 50 + "\x1b[31m\t\n"
        assert write([text], is_terminal=False) == text + "\n"


class TestColours:
    SPANS = (("Hel", False), ("lo", True), (" wor", True), ("ld", False), (" and all of us", True))

    def test_each_text_has_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown = coloured(list(self.SPANS), monkeypatch)
        parts = re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", shown)
        assert "".join(text for code, text in parts if code == "32") == "lo" + "wor" + "andallofus"
        assert "".join(text for code, text in parts if code == "35") == "Hel" + "ld"
        assert without_colours(shown) == "Hello world and all\nof us\n"

    def test_none_when_not_wanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = "Hello world and all\nof us\n"
        assert coloured(list(self.SPANS), monkeypatch, NO_COLOR="1") == expected
        assert "\x1b" not in coloured(list(self.SPANS), monkeypatch, TERM="dumb")
