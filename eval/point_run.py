"""A point measured in the folder of a Hydra run, with a progress bar."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers.utils import logging as transformers_logging

from specdec.eval.point import is_finished, measure_point, read_summary
from specdec.eval.records import Records


def quiet_libraries() -> None:
    """Let our own loggers tell what they do and transformers only its errors."""
    logging.getLogger("specdec").setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()  # it warns of the EOS id that is never met, every time


def samples_bar(console: Console) -> Progress:
    """Return a progress display for samples."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True)


def run_point(config: Any, console: Console) -> tuple[Records, dict[str, Any]]:
    """Measure what a config describes into the run's folder; return the records and their figures.

    Raises:
        SpecdecError: as `measure_point` does.
    """
    quiet_libraries()
    folder = Path(HydraConfig.get().runtime.output_dir)
    was_finished = is_finished(folder)
    with samples_bar(console) as bar:
        task = bar.add_task("samples", total=None)
        records = measure_point(
            config, folder, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    said = f"measured before, nothing was run: {folder}" if was_finished else f"written to {folder}"
    console.print(Text(said), soft_wrap=True)
    return records, read_summary(folder, records)
