"""The door of every measurement: `hydra.main`, and one line for what is wrong in an override, before anything runs.

@hydra_main("speedup")
def main(config: DictConfig) -> None: ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from specdec.errors import ConfigError
from specdec.eval.bad_overrides import ERRORS, missing, refused
from specdec.eval.llm_options import check_method_options

CONFIGS = "specdec.configs"
_VERSION = "1.3"  # of Hydra's rules


def hydra_main(config_name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Make a command of a function of a config: see `hydra.main`.

    What a user can change, such as a setting that does not exist, ends the process with status 2 and one line on
    standard error. In a sweep every value is looked at before the first is run.

    Args:
        config_name: of a YAML file in configs/, without the ending.
    """

    def decorate(task: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        run: Any = hydra.main(version_base=_VERSION, config_path=f"pkg://{CONFIGS}", config_name=config_name)(task)

        @wraps(task)
        def main(config: DictConfig | None = None) -> Any:
            if config is not None:
                return run(config)
            try:
                sys.argv[1:] = prepare(config_name, sys.argv[1:])
            except ConfigError as error:
                Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True, highlight=False)
                sys.exit(2)
            return run()

        return main

    return decorate


def prepare(config_name: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command line as Hydra takes them, or say what is wrong with them.

    A `+` before a setting that exists is left out, which Hydra would refuse.

    Raises:
        ConfigError: a name is unknown, a value has the wrong type, or one that is needed is missing.
    """
    given, _ = get_args_parser().parse_known_args(list(words))
    if given.config_path or given.experimental_rerun or given.shell_completion or given.hydra_help or given.info:
        return list(words)  # nothing is run, or it is with files of the user's own
    own = [] if given.config_dir is None else [f"hydra.searchpath=[file://{Path(given.config_dir).resolve()}]"]
    with initialize_config_module(CONFIGS, version_base=_VERSION):
        line = _Line(given.config_name or config_name, own)
        spelled = line.check(given.overrides, sweeps=given.multirun, complete=not (given.help or given.cfg))
    return [spelled.get(word, word) for word in words]


class _Line:
    """The overrides of one command line, looked at within an initialised Hydra.

    Args:
        config_name: of the main config.
        own: overrides that go before all.
    """

    def __init__(self, config_name: str, own: list[str]) -> None:
        self._name, self._own = config_name, own

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
        if sweeps or str(config.hydra.mode).endswith("MULTIRUN"):  # where the config has sweeps of its own
            own = [f"{name}={value}" for name, value in (config.hydra.sweeper.get("params") or {}).items()]
            values = [self._values(word, sweeps=True) for word in own] + values
        first = [options[0] for options in values]
        for overrides in (first, *_others(first, values)):
            config = self._compose(overrides)
            if complete:
                missing(config)
                check_method_options(config)
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
            loader = GlobalHydra.instance().config_loader()
            return OverridesParser.create(config_loader=loader).parse_overrides([word])[0]
        except ERRORS as error:
            raise refused(error, self._compose([])) from error

    def _values(self, word: str, sweeps: bool) -> list[str]:
        """Return the overrides that a word stands for: one, or one per value of a sweep."""
        override = self._parse(word)
        if not sweeps or not override.is_discrete_sweep():
            return [word]
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]

    def _without_plus(self, words: Sequence[str], sweeps: bool) -> dict[str, str]:
        """Return every word, without its `+` if that is before a setting that exists or that a schema would know."""
        added = [word for word in words if self._parse(word).is_add()]
        spelled = {word: word for word in words}
        if added:
            config = self._compose([self._values(word, sweeps)[0] for word in words if word not in added])
        for word in added:
            key = self._parse(word).key_or_group
            known, group = OmegaConf.select(config, key), OmegaConf.select(config, key.rpartition(".")[0])
            if is_dataclass(OmegaConf.get_type(group)) or not (known is None or OmegaConf.is_config(known)):
                spelled[word] = word[1:]
        return spelled


def _others(first: Sequence[str], values: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield the overrides with every value of a sweep but its first, one sweep at a time."""
    for place, options in enumerate(values):
        for option in options[1:]:
            yield [*first[:place], option, *first[place + 1 :]]
