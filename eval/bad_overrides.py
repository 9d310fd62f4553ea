"""What is wrong with an override: Hydra's and OmegaConf's exceptions as one line that names the setting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from specdec.errors import ConfigError

# Hydra raises a ValueError for an override such as engine=3.
ERRORS = (HydraException, OmegaConfBaseException, ValueError)
_OWN = "hydra"  # the part of a config that is Hydra's
KINDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list such as [a,b]",
    dict: "{name: value}",
}
_CHOICES = f"{_OWN}.runtime.choices"


def refused(error: Exception, defaults: DictConfig) -> ConfigError:
    """Return what a user is told about an exception of Hydra's.

    Args:
        error: one of `ERRORS`.
        defaults: the config without any override, with Hydra's part.
    """
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else error
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override!r} cannot be read ({_first_line(error)}); allowed: name=value")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, member = str(error.missing_cfg_file).rpartition("/")
        return ConfigError(f"{group}={member} is not there;{_near(member, error.options)}")
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        return unknown_setting(str(cause.full_key), cause.parent_node)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return ConfigError(f"{cause.full_key}={_as_yaml(cause.value)}; allowed: {_allowed(cause)}")
    return ConfigError(_of_text(" ".join(str(cause or error).split()), defaults))


def missing(config: DictConfig) -> None:
    """Raise ConfigError if a setting that must be given has no value."""
    names = [name for name, has_value in _settings(config) if not has_value]
    if names:
        raise ConfigError(f"{' and '.join(names)} must be given: {' '.join(f'{name}=...' for name in names)}")


def unknown_setting(key: str, group: Any) -> ConfigError:
    """Return the complaint about a setting that does not exist, with the nearest of its group, else of all.

    Args:
        key: dotted.
        group: the part of the config that it would stand in.
    """
    before, _, name = key.rpartition(".")
    names = [str(name) for name in group if name != _OWN]
    group_too = key.replace("_", ".", 1)  # drafter_options, as beside and the LLM spell it, for drafter.options
    if group_too in (dotted for dotted, _ in _settings(group._get_root())):
        return ConfigError(f"there is no setting {key!r}; did you mean {group_too!r}?")
    if not get_close_matches(name, names, n=1):
        elsewhere = [dotted for dotted, _ in _settings(group._get_root()) if dotted.rpartition(".")[2] == name]
        if elsewhere:
            return ConfigError(f"there is no setting {key!r}; did you mean {' or '.join(elsewhere)}?")
    return ConfigError(f"there is no setting {key!r};{_near(name, names, f'{before}.' if before else '')}")


def not_removable(key: str, config: DictConfig) -> ConfigError:
    """Return the complaint about an override `~key` of a setting that must be there, or that is not."""
    group, _, name = key.rpartition(".")
    node = OmegaConf.select(config, group) if group else config
    if name not in node:
        return unknown_setting(key, node)
    return ConfigError(f"~{key}: a setting cannot be taken away; give it another value: {key}=...")


def _settings(config: DictConfig, before: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the dotted name of every setting but Hydra's own, and whether it has a value."""
    for key, value in config.items_ex(resolve=False):
        if before or key != _OWN:
            name, has_value = f"{before}{key}", not OmegaConf.is_missing(config, key)
            yield name, has_value
            if has_value and isinstance(value, DictConfig) and not value._is_none() and not value._is_interpolation():
                yield from _settings(value, f"{name}.")


def _near(name: str, names: Iterable[str], before: str = "") -> str:
    names = sorted(names)
    close = get_close_matches(name, names, n=1)
    hint = f" did you mean {before + close[0]!r}?" if close else ""
    where = f" in {before[:-1]}" if before else ""
    return f"{hint} available{where}: {', '.join(names) or 'none'}"


def _allowed(cause: Any) -> str:
    """Return the type of a setting in words, or what OmegaConf says of it."""
    kind = None if cause.parent_node is None else OmegaConf.get_type(cause.parent_node)
    if kind is None or not is_dataclass(kind) or cause.key not in get_type_hints(kind):
        return _first_line(cause)
    hint = get_type_hints(kind)[cause.key]
    either = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [get_origin(k) or k for k in either if k is not NoneType]
    words = [KINDS.get(k, getattr(k, "__name__", str(k))) for k in kinds]
    return " or ".join(words + ["null"] * (NoneType in either))


def _of_text(text: str, defaults: DictConfig) -> str:
    """Return a message of Hydra's that has no exception behind it, in words that help with these commands."""
    no_group = re.match(r"Could not override '([^']+)'\. No match", text)
    if no_group:
        groups = [name for name in OmegaConf.select(defaults, _CHOICES) if not name.startswith(f"{_OWN}/")]
        return f"this measurement has no group {no_group[1]!r};{_near(no_group[1], groups)}"
    several = re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'", text)
    if several:
        name, _, values = several[1].partition("=")
        return f"{several[1]} is several values: add -m to run each, or write {name}=[{values}] for a list"
    return text


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
