"""What happens around a sweep: one at a time in a folder, what is done already, and at the end what became of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from filelock import FileLock, Timeout
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
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
from specdec.eval.sweep_point import (
    NUM_POINTS,
    SWEPT_KEYS,
    digest,
    folder_of,
    parse_overrides,
    point_name,
    score_of,
)
from specdec.provenance import ARGV

_LOCK, _SWEEP = ".sweep.lock", "sweep.json"
_MEASURED = "measured"  # what is said of a point that was


class SweepWatch(Callback):
    """Hydra tells it when a sweep, or a single point, begins and ends.

    Hydra warns of exceptions here and goes on without what they kept from happening; so none leaves.
    """

    # Of the class, not of the object, which launchers send to other processes.
    failed: ClassVar[bool] = False  # a point of this process's sweep, or all of those that competed
    _lock: ClassVar[FileLock | None] = None

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}  # of the jobs, wherever they run

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self._begin(config, Path(config.hydra.run.dir))

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        self._end(config, Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self._begin(config, Path(config.hydra.sweep.dir))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        self._end(config, Path(config.hydra.sweep.dir))

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        os.environ.update(self._environment)

    def _begin(self, config: DictConfig, folder: Path) -> None:
        try:
            self._take(config, folder)
            grid = grid_of(config) if config.hydra.mode == RunMode.MULTIRUN else {}
            num_points = "?" if _has_rounds(config) else str(prod(grid.values()))
            self._environment = {SWEPT_KEYS: " ".join(grid), NUM_POINTS: num_points, ARGV: json.dumps(sys.argv)}
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
        SweepWatch.failed = False
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
            own = self._own_points(config, folder)
            states = {path: _state(path) for path in sorted({*points_of(folder), *own})}
            table = Table(title=Text(str(folder)), box=None, pad_edge=False)
            for column in ("point", "state", "best speedup"):
                table.add_column(column, justify="right" if column == "best speedup" else "left", overflow="fold")
            for path, state in states.items():
                table.add_row(Text(path.name), Text(state), _speed(path))
            Console().print(table)
            _say(f"read it: specdec report {folder}")
            SweepWatch.failed |= any(states[path] != _MEASURED for path in own)
        except Exception as error:
            SweepWatch.failed = True
            print_error(f"what became of the sweep cannot be told: {type(error).__name__}: {error}")
        finally:
            for name in self._environment:
                os.environ.pop(name, None)
            if SweepWatch._lock is not None:
                SweepWatch._lock.release()

    def _own_points(self, config: DictConfig, folder: Path) -> list[Path]:
        """Return the folders of all points that this run was to measure, be they there or not.

        Where settings compete there are none: one that does not run here has lost, which is what was to be found out.
        """
        if config.hydra.mode != RunMode.MULTIRUN:
            return [_folder_of(config, folder, "point")]
        if _has_rounds(config):
            return []
        loader = GlobalHydra.instance().config_loader()
        swept = self._environment[SWEPT_KEYS].split()
        found = []
        for words in BasicSweeper.split_arguments(_overrides(config), None)[0]:
            name = point_name(parse_overrides(words), swept)
            found.append(_folder_of(loader.load_sweep_config(config, words), folder, name))
        return found


def _refuse(message: str) -> NoReturn:
    print_error(message)
    sys.exit(2)


def _say(message: str, stderr: bool = False) -> None:
    Console(stderr=stderr).print(Text(message), soft_wrap=True)


def _has_rounds(config: DictConfig) -> bool:
    """Tell whether the sweeper chooses among settings and therefore has no fixed number of points."""
    return OmegaConf.select(config, "hydra.sweeper.rungs") is not None


def _overrides(config: DictConfig) -> list[Override]:
    """Return what the config of a multirun and its command line set, sweeps included."""
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    return OverridesParser.create(config_loader=loader).parse_overrides([*words, *config.hydra.overrides.task])


def grid_of(config: DictConfig) -> dict[str, int]:
    """Return the swept keys of a multirun's config, and how many values each has; 1 where settings compete."""
    grids = OmegaConf.select(config, "hydra.sweeper.grids") or []
    if grids:  # what differs between them, and between rounds
        names = [word.partition("=")[0].lstrip("+") for grid in grids for word in shlex.split(grid)]
        return dict.fromkeys([*names, "prompts.limit"], 1)
    last = {override.key_or_group: override for override in _overrides(config)}
    return {key: len(list(o.sweep_string_iterator())) for key, o in last.items() if o.is_sweep_override()}


def points_of(folder: Path) -> list[Path]:
    """Return the folders of points, begun or failed, in a sweep's folder."""
    return sorted({path.parent for name in (RECORDS, ERROR) for path in folder.glob(f"*/{name}")})


def _folder_of(config: DictConfig, folder: Path, name: str) -> Path:
    """Return the folder of the point that a config with Hydra's part describes."""
    measured = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    return folder_of(folder, name, digest(measured))


def _state(folder: Path) -> str:
    try:
        return f"failed: {json.loads((folder / ERROR).read_text())['message']}"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, KeyError):
        return "failed"
    if not (folder / RECORDS).exists():
        return "failed and left nothing: what was said of it above is all there is"
    try:
        return _MEASURED if read_records(folder / RECORDS).end is not None else "begun"
    except InputError as error:
        return f"failed: {error}"


def _speed(folder: Path) -> str:
    try:
        score = score_of(json.loads((folder / SUMMARY).read_text()))
    except (OSError, ValueError, KeyError):
        return "-"
    return "-" if isinstance(score, str) else f"{score:.2f}x"
