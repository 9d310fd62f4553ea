"""What every measurement's command does around measuring: bad input in one line, the tables, then the JSON file."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from transformers.utils import logging as transformers_logging

from specdec.errors import SpecdecError

Measured = dict[str, Any]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *others = rows
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
        result = measure(config)
    except SpecdecError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(2)
    try:
        shown = show(result)  # first: a result that cannot be written is still seen
    finally:
        path = Path(config.output or Path(HydraConfig.get().runtime.output_dir) / f"{name}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
    if markdown is not None:
        path.with_suffix(".md").write_text(markdown(result))
    Console().print(f"written to {path}", highlight=False)
    return shown
