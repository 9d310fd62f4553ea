"""The log of a long preparation: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from specdec.cli import progress
from specdec.cli.progress import LogView
from specdec.models.progress import report, reporting
from tests.cli.running import without_colours

log = logging.getLogger("specdec")


def show(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, spin: bool = True) -> str:
    """Log all kinds of things while something is being done."""
    file = io.StringIO()
    monkeypatch.setattr(
        progress, "messages", lambda: Console(file=file, force_terminal=is_terminal, width=80, highlight=False)
    )
    with LogView() as view:
        with view.doing("loading tiny", spin=spin):
            log.info("reading it")
            log.warning("it is \x1b[31mlarge")
            for done in range(3):
                report("timing kernels", done, 3)
                if view._progress is not None:
                    view._progress.refresh()
            report("timing kernels", 3, 3)
            log.debug("nobody wants to know")
        with view.held():
            log.warning("said while text was written")
            assert "said while" not in file.getvalue()
        log.info("passed by")
    return file.getvalue()


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = show(monkeypatch, is_terminal=False).splitlines()
    assert lines[:4] == ["loading tiny ...", "reading it", "it is [31mlarge", "timing kernels"]
    assert lines[4].startswith("loading tiny: ")
    assert lines[5:] == ["said while text was written"]


@pytest.mark.parametrize("spin", [True, False])
def test_bar(monkeypatch: pytest.MonkeyPatch, spin: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = show(monkeypatch, is_terminal=True, spin=spin)
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0, "the cursor stays hidden"
    assert "\x1b[31m" not in shown
    text = without_colours(shown)
    assert "━" in text
    assert "timing kernels" in text
    assert "nobody wants" not in text
    assert "passed by" not in text
    assert "\nsaid while text was written\n" in text


def test_logging_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (log.level, log.propagate, list(log.handlers))
    show(monkeypatch, is_terminal=False)
    assert (log.level, log.propagate, log.handlers) == before


def test_reports(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "specdec"):
        assert list(reporting("counting", range(1000))) == list(range(1000))
        list(reporting("nothing", []))
    steps = [record.progress for record in caplog.records]  # type: ignore[attr-defined]
    assert steps[0] == (0, 1000)
    assert steps[-2] == (1000, 1000)
    assert len(steps) <= 53
    assert [record.levelname for record in caplog.records].count("INFO") == 2
