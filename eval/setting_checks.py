"""Whether a value is what a setting takes: whole numbers, amounts, lists. For the `__post_init__` of config classes."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from specdec.errors import ConfigError

_LARGEST = 2**63 - 1  # what torch takes as a seed or a size


def check_settings(kind: type, config: Any) -> None:
    """Raise ConfigError for a setting that has the wrong type or is out of its range: build its class, which checks.

    Args:
        kind: a dataclass of settings.
        config: what a measurement's file has at its top, and perhaps more.
    """
    given: Any = OmegaConf.to_container(config, resolve=True)
    kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})


def check_integer(name: str, value: Any, least: int, optional: bool = False) -> None:
    """Raise ConfigError unless a value is an integer that is large enough, or, if `optional`, None."""
    is_integer = isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST
    if not is_integer and not (optional and value is None):
        raise ConfigError(f"{name}={value!r}; allowed: an integer >= {least}" + " or null" * optional)


def check_amount(name: str, value: Any, optional: bool = False) -> None:
    """Raise ConfigError unless a value is a finite number of at least 0, or, if `optional`, None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value >= 0) and not (optional and value is None):
        raise ConfigError(f"{name}={value!r}; allowed: a finite number >= 0" + " or null" * optional)


def check_flag(name: str, value: Any) -> None:
    """Raise ConfigError unless a value is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}; allowed: true or false")


def check_list(name: str, value: Any, kind: type, example: str, optional: bool = False) -> None:
    """Raise ConfigError unless a value is a list with something in it, all of one kind, or, if `optional`, None."""
    if optional and value is None:
        return
    is_list = isinstance(value, list | tuple) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
    if not is_list or not value:
        allowed = f"a list of at least one, such as [{example}]" + ", or null" * optional
        raise ConfigError(f"{name}={value!r}; allowed: {allowed}")
    if len(set(value)) < len(value):
        raise ConfigError(f"{name}={value!r} has an entry twice; give each once")
