"""What happens around a sweep: one at a time in a folder, what is done already, and at the end what became of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from specdec.errors import InputError
from specdec.eval.records import ERROR, RECORDS, SUMMARY, read_records
from specdec.eval.sweep_point import NUM_POINTS, SWEPT_KEYS, score_of

_LOCK, _SWEEP = ".sweep.lock", "sweep.json"


class SweepWatch(Callback):
    """Hydra tells it when a sweep, or a single point, begins and ends."""

    # Of the class, not of the object, which launchers send to other processes.
    failed: ClassVar[bool] = False  # a point of this process's sweep
    _lock: ClassVar[FileLock | None] = None

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self._begin(config, Path(config.hydra.run.dir), {})

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        self._end(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self._begin(config, Path(config.hydra.sweep.dir), grid_of(config))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        self._end(Path(config.hydra.sweep.dir))

    def _begin(self, config: DictConfig, folder: Path, grid: dict[str, int]) -> None:
        console = Console(stderr=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            SweepWatch._lock = FileLock(folder / _LOCK, timeout=0)
            SweepWatch._lock.acquire()
            self._take(config, folder)
        except Timeout:
            console.print(f"[red]error:[/red] another sweep writes into {folder}; give another name=", highlight=False)
            sys.exit(2)
        except (OSError, InputError) as error:
            console.print(f"[red]error:[/red] {error}", highlight=False)
            sys.exit(2)
        os.environ[SWEPT_KEYS] = " ".join(grid)
        os.environ[NUM_POINTS] = "?" if OmegaConf.select(config, "hydra.sweeper.grids") else str(prod(grid.values()))
        done = sum(_state(path) == "measured" for path in points_of(folder))
        if done:
            console.print(
                f"{folder} holds {done} finished points: those of this sweep are not run again", highlight=False
            )

    def _take(self, config: DictConfig, folder: Path) -> None:
        """Write what a folder is for; refuse one that is for something else."""
        mine = {"name": config.get("name"), "question": config.get("question")}
        path = folder / _SWEEP
        if path.exists():
            theirs = json.loads(path.read_text())
            if theirs != mine:
                raise InputError(
                    f"{folder} is of the sweep {theirs.get('name')!r} ({theirs.get('question')}), this is "
                    f"{mine['name']!r} ({mine['question']}); give another hydra.sweep.dir or name="
                )
        path.write_text(json.dumps(mine, indent=1))

    def _end(self, folder: Path) -> None:
        console = Console()
        table = Table(title=str(folder), box=None, pad_edge=False)
        for column in ("point", "state", "best speedup"):
            table.add_column(column, justify="right" if column == "best speedup" else "left", overflow="fold")
        for path in points_of(folder):
            state = _state(path)
            SweepWatch.failed |= state.startswith("failed")
            table.add_row(path.name, state, _speed(path))
        console.print(table)
        console.print(f"read it: specdec report {folder}", highlight=False)
        if self._lock is not None:
            self._lock.release()


def grid_of(config: DictConfig) -> dict[str, int]:
    """Return the swept keys of a multirun's config, and how many values each has."""
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    for grid in OmegaConf.select(config, "hydra.sweeper.grids") or []:
        words += shlex.split(grid)
    last = {o.get_key_element(): o for o in OverridesParser.create().parse_overrides([*words, *_given(config)])}
    return {key.lstrip("+"): len(list(o.sweep_iterator())) for key, o in last.items() if o.is_sweep_override()}


def _given(config: DictConfig) -> list[str]:
    return list(config.hydra.overrides.task)


def points_of(folder: Path) -> list[Path]:
    """Return the folders of points, begun or failed, in a sweep's folder."""
    return sorted({path.parent for name in (RECORDS, ERROR) for path in folder.glob(f"*/{name}")})


def _state(folder: Path) -> str:
    error = folder / ERROR
    if error.exists():
        try:
            return f"failed: {json.loads(error.read_text())['message']}"
        except (OSError, ValueError, KeyError):
            return "failed"
    try:
        return "measured" if read_records(folder / RECORDS).end is not None else "begun"
    except InputError as error_of_it:
        return f"failed: {error_of_it}"


def _speed(folder: Path) -> str:
    try:
        score = score_of(json.loads((folder / SUMMARY).read_text()))
    except (OSError, ValueError, KeyError):
        score = None
    return "-" if score is None else f"{score:.2f}x"
