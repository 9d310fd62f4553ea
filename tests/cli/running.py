"""Running the `specdec` command in the tests' own process, and in a terminal."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from specdec.cli import app

Result = Any  # of typer's runner, which builds on click or on its own copy of it, by version
PROMPT = "one two one two one"
NUM_TOKENS = 12


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, args, input=stdin)


def generate(model: str, *args: str, prompt: str = PROMPT, stdin: str | bytes | None = None) -> Result:
    own = ("generate", "--model", model, "--prompt", prompt, "--max-new-tokens", str(NUM_TOKENS))
    return run(*own, *args, stdin=stdin)


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(result: Result) -> str:
    """Return the one line that a refused command leaves on standard error."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.output
    return lines[0]


class Terminal:
    """A program in a pseudo terminal."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self._descriptor = process, descriptor
        self.text = ""

    def read_until(self, pattern: str | None, timeout_s: float = 60.0) -> str:
        """Return what it shows from here on until `pattern` is seen or, with None, until it is gone."""
        text, deadline = "", time.monotonic() + timeout_s
        characters = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        while time.monotonic() < deadline and not (pattern and re.search(pattern, text)):
            if not select.select([self._descriptor], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._descriptor, 4096)
            except OSError:  # how Linux says that nobody holds the other end any more
                break
            if not data:
                break
            text += characters.decode(data)
        self.text += text
        assert pattern is None or re.search(pattern, text), text
        return text

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt_prompt(self) -> None:
        """Send Ctrl-C once the program waits for a line.

        Python notices a signal that arrives between the prompt and the wait only at the next key.
        """
        state, deadline = Path(f"/proc/{self.process.pid}/stat"), time.monotonic() + 20.0
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "the program never waits"
            time.sleep(0.01)
        self.process.send_signal(signal.SIGINT)


@contextmanager
def terminal(*args: str, **environment: str) -> Iterator[Terminal]:
    """Run `python -m specdec` in a terminal of 80 columns."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec", *args],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
        start_new_session=True,
    )
    os.close(child)
    try:
        yield Terminal(process, parent)
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
