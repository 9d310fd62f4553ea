"""What every measurement's command does around measuring: errors in one line, the tables, then the JSON file."""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from specdec.errors import ConfigError, SpecdecError

Measured = dict[str, Any]
_OPTION = re.compile(r"\b(drafter|verifier)_options=\{'(\w+)': ([^{}]*)\}")  # as Python writes what configs do not


def print_error(message: object) -> None:
    """Print one line, "error: ...", on standard error, whatever the text holds; options as configs write them."""
    text = " ".join(_OPTION.sub(r"\1.options.\2=<\3>", str(message)).split())
    shown = "".join(c if c.isprintable() else "?" for c in text)
    Console(stderr=True, highlight=False).print(Text.assemble(("error:", "red"), f" {shown}"), soft_wrap=True)


def check_folder(path: Path, setting: str) -> None:
    """Raise ConfigError unless a folder can be written to, or be made; nothing stays behind.

    Args:
        path: of the folder, or of what is to be one.
        setting: that names it.
    """
    try:
        nearest = path.absolute()
        while not (nearest.exists() or nearest.is_symlink()):
            nearest = nearest.parent
        with tempfile.TemporaryDirectory(dir=nearest):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting}={path} cannot be written to ({why}); give another folder") from error


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *others = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *others)]
    return "".join(f"| {line} |\n" for line in lines)


def run_and_write(
    config: Any,
    name: str,
    measure: Callable[[Any], Measured],
    show: Callable[[Measured], Any],
    markdown: Callable[[Measured], str] | None = None,
) -> Any:
    """Measure what a config describes, print it and write `name`.json, even if it cannot be printed.

    Returns what `show` does.

    Ends the process with status 2 on what the user can change.

    Args:
        config: with `output`, a file, or None for one in the run's folder.
        name: of the file.
        measure: from the config to a result that JSON can hold.
        show: prints a result.
        markdown: a page to be written beside the JSON.
    """
    logging.getLogger("specdec").setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()  # it warns of the EOS id that is never met, every time
    try:
        path = _output(config, name)
        result = measure(config)
    except SpecdecError as error:
        print_error(error)
        sys.exit(2)
    try:
        shown = show(result)  # first: a result that cannot be written is still seen
    finally:
        _write(path, json.dumps(result, indent=1))
    if markdown is not None:
        _write(path.with_suffix(".md"), markdown(result))
    Console().print(Text(f"written to {path}"), soft_wrap=True)
    return shown


def _output(config: Any, name: str) -> Path:
    """Return the file that a result goes to, which can be written."""
    if config.output is None:
        return Path(HydraConfig.get().runtime.output_dir) / f"{name}.json"
    path = Path(str(config.output))
    if path.is_dir():
        raise ConfigError(f"output={path} is a folder; give a file in it")
    check_folder(path.parent, "output")
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print_error(f"{path} cannot be written ({error.strerror or error}); what is printed above is all there is")
        sys.exit(2)
