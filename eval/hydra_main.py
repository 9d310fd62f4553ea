"""The door of every measurement: `hydra.main`, and one line for what is wrong in an override, before anything runs.

@hydra_main("speedup")
def main(config: DictConfig) -> None: ...
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from specdec.errors import ConfigError, SpecdecError
from specdec.eval.bad_overrides import ERRORS, not_removable, refused, unknown_setting
from specdec.eval.config_checks import check_config, check_flags, check_folders, grids_of
from specdec.eval.entry import print_error
from specdec.eval.records import RECORDS

CONFIGS = "specdec.configs"
_ALIAS = re.compile(r"^(\+*)engine\.max_new_tokens=")
_VERSION = "1.3"  # of Hydra's rules
_INTERRUPTED = 130


def hydra_main(config_name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Make a command of a function of a config: see `hydra.main`.

    What a user can change, such as a setting that does not exist, ends the process with status 2 and one line on
    standard error; Ctrl-C with 130. In a sweep every value is looked at before the first is run.

    Args:
        config_name: of a YAML file in configs/, without the ending.
    """

    def decorate(task: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        @wraps(task)
        def guarded(config: DictConfig) -> Any:
            try:
                return task(config)
            except SpecdecError as error:
                print_error(error)
                sys.exit(2)
            except KeyboardInterrupt:
                _end_interrupted(how_to_go_on())

        run: Any = hydra.main(version_base=_VERSION, config_path=f"pkg://{CONFIGS}", config_name=config_name)(guarded)

        @wraps(task)
        def main(config: DictConfig | None = None) -> Any:
            if config is not None:
                return run(config)
            try:
                sys.argv[1:] = prepare(config_name, sys.argv[1:])
                return run()
            except ConfigError as error:
                print_error(error)
                sys.exit(2)
            except KeyboardInterrupt:
                _end_interrupted("")

        return main

    return decorate


def how_to_go_on() -> str:
    """Return how an interrupted run goes on where it stopped, in words; nothing if it cannot."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if (folder / RECORDS).exists():
        return f"; run the same command again with hydra.run.dir={folder}: it goes on where it stopped"
    if any(folder.glob(f"*/{RECORDS}")):
        return "; run the same command again: it goes on where it stopped"
    return ""


def _end_interrupted(how: str) -> NoReturn:
    Console(stderr=True).print(f"interrupted{how}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    sys.exit(_INTERRUPTED)


def prepare(config_name: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command line as Hydra takes them, or say what is wrong with them.

    A `+` before a setting that exists is left out, which Hydra would refuse. `engine.max_new_tokens` is the one at the
    top: it is looked for beside the engine's other limits.

    Raises:
        ConfigError: a name is unknown, a value is not allowed, one that is needed is missing, or the folder of the run
            cannot be written to.
    """
    given, words = _parsed([_ALIAS.sub(r"\1max_new_tokens=", word) for word in words])
    if given.config_path or given.experimental_rerun or given.shell_completion or given.hydra_help or given.info:
        return words  # nothing is run, or it is with files of the user's own
    if given.config_dir is not None and not Path(given.config_dir).is_dir():
        raise ConfigError(f"--config-dir {given.config_dir} is not there, or is no folder")
    own = [] if given.config_dir is None else [f"hydra.searchpath=[file://{Path(given.config_dir).resolve()}]"]
    with initialize_config_module(CONFIGS, job_name=config_name, version_base=_VERSION):
        line = _Line(given.config_name or config_name, own)
        spelled = line.check(given.overrides, sweeps=given.multirun, complete=not (given.help or given.cfg))
    return [spelled.get(word, word) for word in words]


def _parsed(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return what Hydra's parser makes of the words, and the words with the overrides side by side, as it wants."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help and --hydra-help say what there is")

    parser = get_args_parser()
    parser.error = refuse  # else it prints a page
    given, rest = parser.parse_known_args(list(words))
    if not rest:
        return given, list(words)
    given, rest = parser.parse_known_intermixed_args(list(words))
    if rest:
        refuse(f"there is no flag {rest[0]!r}")
    flags = list(words)[::-1]
    for word in given.overrides[::-1]:
        flags.remove(word)
    return given, [*flags[::-1], *given.overrides]


class _Line:
    """The overrides of one command line, looked at within an initialised Hydra.

    Args:
        config_name: of the main config.
        own: overrides that go before all.
    """

    def __init__(self, config_name: str, own: list[str]) -> None:
        self._name, self._own = config_name, own
        self._loader = GlobalHydra.instance().config_loader()

    def check(self, words: Sequence[str], *, sweeps: bool, complete: bool) -> dict[str, str]:
        """Compose the config with the first value of every sweep, then with every other value.

        Args:
            words: overrides.
            sweeps: several values are allowed.
            complete: nothing that is needed may be missing.

        Returns:
            word -> how Hydra is to be given it.
        """
        spelled = self._without_plus(words, sweeps)
        values = [self._values(word, sweeps) for word in spelled.values()]
        config = self._compose([options[0] for options in values])
        grids: list[list[str]] = []
        sweeps = sweeps or str(config.hydra.mode).endswith("MULTIRUN")  # where the config has sweeps of its own
        if sweeps:
            params = [f"{name}={value}" for name, value in (config.hydra.sweeper.get("params") or {}).items()]
            grids = [*grids_of(config.hydra.sweeper), params]
            values = [self._values(word, sweeps=True) for word in spelled.values()]
        if complete:
            check_folders(config, sweeps)
        defaults = self._compose([])
        for grid in grids or [[]]:
            whole = [self._values(word, sweeps=True) for word in grid] + values
            first = [options[0] for options in whole]
            for overrides in (first, *_others(first, whole)):
                config = self._compose(overrides)
                check_flags(config, map(self._parse, overrides))
                if complete:
                    check_config(config, defaults)
        return spelled

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        try:
            return compose(self._name, [*self._own, *overrides], return_hydra_config=True)
        except ERRORS as error:
            if not overrides:
                raise ConfigError(f"{self._name}: {' '.join(str(error).split())}") from error
            raise refused(error, self._compose([])) from error

    def _parse(self, word: str) -> Override:
        try:
            return OverridesParser.create(config_loader=self._loader).parse_overrides([word])[0]
        except ERRORS as error:
            raise refused(error, self._compose([])) from error

    def _values(self, word: str, sweeps: bool) -> list[str]:
        """Return the overrides that a word stands for: one, or one per value of a sweep."""
        override = self._parse(word)
        if not sweeps or not override.is_discrete_sweep():
            return [word]
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]

    def _without_plus(self, words: Sequence[str], sweeps: bool) -> dict[str, str]:
        """Return every word, without its `+` if that is before a setting that exists or that a schema would know.

        Raises:
            ConfigError: what a word adds has no place, or what it takes away must be there.
        """
        parsed = {word: self._parse(word) for word in words}
        spelled = {word: word for word in words}
        others = [word for word, o in parsed.items() if not (o.is_add() or o.is_force_add() or o.is_delete())]
        if len(others) < len(words):
            config = self._compose([self._values(word, sweeps)[0] for word in others])
        for word, override in parsed.items():
            key = override.key_or_group
            is_group = bool(self._loader.get_group_options(key))
            if word in others or key.startswith("hydra") or (is_group and key not in config):
                continue
            if override.is_delete():
                if _is_closed(OmegaConf.select(config, key.rpartition(".")[0] or None) if "." in key else config):
                    raise not_removable(key, config)
            elif is_group or _is_known(config, key):
                spelled[word] = word.lstrip("+")
        return spelled


def _is_known(config: DictConfig, key: str) -> bool:
    """Tell whether a setting exists; where it may be added it does not.

    Raises:
        ConfigError: it does neither.
    """
    node: Any = config
    parts = key.split(".")
    for place, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part not in node:
            if isinstance(node, DictConfig) and _is_closed(node):
                raise unknown_setting(".".join(parts[: place + 1]), node)
            return False
        parent, node = node, node._get_node(part)
    return _is_closed(parent) or not OmegaConf.is_config(node)


def _is_closed(node: Any) -> bool:
    """Tell whether a part of the config has settings of fixed names."""
    return node is not None and (node._get_parent() is None or is_dataclass(OmegaConf.get_type(node)))


def _others(first: Sequence[str], values: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield the overrides with every value of a sweep but its first, one sweep at a time."""
    for place, options in enumerate(values):
        for option in options[1:]:
            yield [*first[:place], option, *first[place + 1 :]]
