"""What is looked at in a composed config, beyond names and types that Hydra knows, before anything runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from specdec.errors import ConfigError
from specdec.eval.bad_overrides import KINDS, missing
from specdec.eval.comparison import dotted
from specdec.eval.entry import check_folder
from specdec.eval.halving import check_rounds
from specdec.eval.llm_options import check_method_options

_LARGEST = 2**63 - 1  # of an integer


def check_config(config: DictConfig, defaults: DictConfig) -> None:
    """Raise ConfigError, with a setting's dotted name, for what is missing, unknown or out of its range.

    Args:
        config: with Hydra's part.
        defaults: the same without any override.
    """
    missing(config)
    check_method_options(config)
    for group, node in [("", config), *config.items_ex(resolve=False)]:
        kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        for source in getattr(kind, "SOURCES", ()):
            names = [f.name for f in fields(source)]
            values = {name: _plain(node[name]) for name in names}
            with dotted(group, names):
                source(**values)
    if not is_dataclass(OmegaConf.get_type(config)):
        _check_kinds(config, defaults)


def check_flags(config: DictConfig, overrides: Iterable[Override]) -> None:
    """Raise ConfigError for a number where true or false is wanted: OmegaConf would make one of it."""
    for override in overrides:
        key, given = override.key_or_group, override.value()
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if is_number and isinstance(OmegaConf.select(config, key), bool):
            raise ConfigError(f"{key}={given}; allowed: true or false")


def check_folders(config: DictConfig, sweeps: bool) -> None:
    """Raise ConfigError if the folder of the run, or of the sweep, cannot be written to."""
    name = "hydra.sweep.dir" if sweeps else "hydra.run.dir"
    check_folder(Path(str(OmegaConf.select(config, name))), name)


def grids_of(sweeper: Any) -> list[list[str]]:
    """Return the overrides of each grid of the sweeper `successive_halving`, whose settings are checked.

    Raises:
        ConfigError: one of them is out of its range.
    """
    if "rungs" not in sweeper:
        return []
    check_rounds(_plain(sweeper.rungs), sweeper.keep)
    grids = _plain(sweeper.grids)
    if not isinstance(grids, list) or not all(isinstance(grid, str) for grid in grids):
        raise ConfigError(f"hydra.sweeper.grids={grids}; allowed: a list of texts such as 'drafter=ngram,suffix'")
    try:
        return [shlex.split(grid) for grid in grids]
    except ValueError as error:
        raise ConfigError(f"hydra.sweeper.grids={grids} cannot be read ({error})") from error


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _check_kinds(config: DictConfig, defaults: DictConfig, before: str = "") -> None:
    """Raise ConfigError for a setting outside of schemas whose value is of another kind than its default."""
    for key, usual in defaults.items_ex(resolve=False):
        if key not in config or (not before and key == "hydra") or OmegaConf.is_interpolation(config, key):
            continue
        value = config[key]
        if isinstance(usual, DictConfig) and isinstance(value, DictConfig):
            if not is_dataclass(OmegaConf.get_type(usual)):
                _check_kinds(value, usual, f"{before}{key}.")
        elif usual is not None and not _is_like(_plain(value), _plain(usual)):
            raise ConfigError(f"{before}{key}={_plain(value)}; allowed: {KINDS[_kind(_plain(usual))]}")


def _kind(value: Any) -> type:
    return next(kind for kind in KINDS if isinstance(value, kind))


def _is_like(value: Any, usual: Any) -> bool:
    """Tell whether a value may stand where another usually does: an integer for a number, any scalar for a text."""
    if isinstance(usual, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(usual, bool | str)
    if isinstance(usual, int):
        return isinstance(value, int) and abs(value) <= _LARGEST
    if isinstance(usual, float):
        return isinstance(value, int | float) and math.isfinite(value)
    if isinstance(usual, list):
        return isinstance(value, list) and (not usual or all(_is_like(item, usual[0]) for item in value))
    return isinstance(value, dict) if isinstance(usual, dict) else not isinstance(value, list | dict)
