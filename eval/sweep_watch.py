"""What happens around a sweep: one at a time in a folder, what is done already, and at the end what became of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from filelock import FileLock, Timeout
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.errors import InputError, SpecdecError
from specdec.eval.atomic import write_text
from specdec.eval.entry import print_error
from specdec.eval.records import ERROR, RECORDS, SUMMARY, read_records
from specdec.eval.sweep_point import NUM_POINTS, SWEPT_KEYS, score_of

_LOCK, _SWEEP = ".sweep.lock", "sweep.json"
_MEASURED = "measured"  # what is said of a point that was


class SweepWatch(Callback):
    """Hydra tells it when a sweep, or a single point, begins and ends.

    Hydra warns of exceptions here and goes on without what they kept from happening; so none leaves.
    """

    # Of the class, not of the object, which launchers send to other processes.
    failed: ClassVar[bool] = False  # a point of this process's sweep
    _lock: ClassVar[FileLock | None] = None
    _begun_s: ClassVar[float] = 0.0

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self._begin(config, Path(config.hydra.run.dir))

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        self._end(config, Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self._begin(config, Path(config.hydra.sweep.dir))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        self._end(config, Path(config.hydra.sweep.dir))

    def _begin(self, config: DictConfig, folder: Path) -> None:
        try:
            self._take(config, folder)
            grid = grid_of(config) if config.hydra.mode == RunMode.MULTIRUN else {}
            os.environ[SWEPT_KEYS] = " ".join(grid)
            os.environ[NUM_POINTS] = "?" if _has_rounds(config) else str(prod(grid.values()))
            done = sum(_state(path) == _MEASURED for path in points_of(folder))
        except Timeout:
            _refuse(f"another sweep writes into {folder}; give another hydra.sweep.dir or name=")
        except OSError as error:
            _refuse(f"{folder} cannot be written ({error}); give another hydra.sweep.dir or name=")
        except Exception as error:
            _refuse(str(error) if isinstance(error, SpecdecError) else f"{type(error).__name__}: {error}")
        if done:
            _say(f"{folder} holds {done} finished points: those of this sweep are not run again", stderr=True)

    def _take(self, config: DictConfig, folder: Path) -> None:
        """Lock a folder and write what it is for; refuse one that is for something else."""
        folder.mkdir(parents=True, exist_ok=True)
        SweepWatch._lock = FileLock(folder / _LOCK, timeout=0)
        SweepWatch._lock.acquire()
        SweepWatch._begun_s = time.time()
        name, path = config.get("name"), folder / _SWEEP
        try:
            found = json.loads(path.read_text())
            theirs = found.get("name", name)
        except (OSError, ValueError, AttributeError):
            theirs = name  # there is none, or what a full disk left of it
        if theirs != name:
            raise InputError(
                f"{folder} is of the sweep {theirs!r}, this is {name!r}; give another hydra.sweep.dir or name="
            )
        write_text(path, json.dumps({"name": name, "question": config.get("question")}, indent=1))

    def _end(self, config: DictConfig, folder: Path) -> None:
        try:
            points = points_of(folder)
            table = Table(title=Text(str(folder)), box=None, pad_edge=False)
            for column in ("point", "state", "best speedup"):
                table.add_column(column, justify="right" if column == "best speedup" else "left", overflow="fold")
            for path in points:
                table.add_row(Text(path.name), Text(_state(path)), _speed(path))
            Console().print(table)
            _say(f"read it: specdec report {folder}")
            bad = [path for path in points if _state(path) != _MEASURED and _changed_s(path) >= SweepWatch._begun_s]
            # Where settings compete, one that does not run here has lost; that is what was to be found out.
            SweepWatch.failed = bool(bad) and (not _has_rounds(config) or len(bad) == len(points))
        except Exception as error:
            SweepWatch.failed = True
            print_error(f"what became of the sweep cannot be told: {type(error).__name__}: {error}")
        finally:
            if SweepWatch._lock is not None:
                SweepWatch._lock.release()


def _refuse(message: str) -> NoReturn:
    print_error(message)
    sys.exit(2)


def _say(message: str, stderr: bool = False) -> None:
    Console(stderr=stderr).print(Text(message), soft_wrap=True)


def _has_rounds(config: DictConfig) -> bool:
    """Tell whether the sweeper chooses among settings and therefore has no fixed number of points."""
    return OmegaConf.select(config, "hydra.sweeper.rungs") is not None


def _changed_s(folder: Path) -> float:
    """Return when a point's folder last changed."""
    return max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)


def grid_of(config: DictConfig) -> dict[str, int]:
    """Return the swept keys of a multirun's config, and how many values each has; 1 where settings compete."""
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    grids = OmegaConf.select(config, "hydra.sweeper.grids") or []
    if grids:  # what differs between them, and between rounds
        names = [word.partition("=")[0].lstrip("+") for grid in grids for word in shlex.split(grid)]
        return dict.fromkeys([*names, "prompts.limit"], 1)
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    given = OverridesParser.create(config_loader=loader).parse_overrides([*words, *config.hydra.overrides.task])
    last = {override.key_or_group: override for override in given}
    return {key: len(list(o.sweep_string_iterator())) for key, o in last.items() if o.is_sweep_override()}


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
        return _MEASURED if read_records(folder / RECORDS).end is not None else "begun"
    except InputError as error_of_it:
        return f"failed: {error_of_it}"


def _speed(folder: Path) -> str:
    try:
        score = score_of(json.loads((folder / SUMMARY).read_text()))
    except (OSError, ValueError, KeyError):
        score = None
    return "-" if score is None else f"{score:.2f}x"
