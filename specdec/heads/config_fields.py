"""Reading a checkpoint's config.json field by field, saying which field is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specdec.errors import CheckpointError
from specdec.heads.config_checks import is_number

T = TypeVar("T")
_MISSING: Any = object()


class ConfigFields:
    """A JSON object whose fields are asked for by type. `null` counts as absent, as in transformers' configs."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: Any = _MISSING) -> int:
        """Return an integer > 0, or `default` where there is none."""
        found: int = self._get(name, default, lambda v: type(v) is int and v > 0, "an integer > 0")
        return found

    def number(self, name: str, default: Any = _MISSING) -> float:
        found = self._get(name, default, is_number, "a finite number")
        return float(found)

    def text(self, name: str, default: Any = _MISSING) -> str:
        found: str = self._get(name, default, lambda v: isinstance(v, str), "a text")
        return found

    def flag(self, name: str, default: T) -> bool | T:
        found: bool | T = self._get(name, default, lambda v: isinstance(v, bool), "true or false")
        return found

    def integers(self, name: str) -> list[int] | None:
        found: list[int] | None = self._get(
            name, None, lambda v: isinstance(v, list) and all(type(x) is int for x in v) and v, "a list of integers"
        )
        return found

    def numbers(self, name: str) -> list[float]:
        """Return a list of finite numbers."""
        found: list[float] = self._get(
            name, _MISSING, lambda v: isinstance(v, list) and all(map(is_number, v)), "a list of numbers"
        )
        return found

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; a single one counts as a list of it."""
        found = self._get(name, [], lambda v: isinstance(v, str | list), "a list of texts")
        return [found] if isinstance(found, str) else [x for x in found if isinstance(x, str)]

    def inner(self, name: str) -> ConfigFields:
        """Return the object under `name`, an empty one where there is none."""
        found = self._get(name, {}, lambda v: isinstance(v, dict), "an object")
        return ConfigFields(found, f"{self.where}, {name}")

    def advice(self) -> dict[str, Any]:
        """Return these fields as options that a drafter advises. A tree is checked where it is drafted with."""
        self.integer("max_draft_tokens", None)
        return dict(self.values)

    def _get(self, name: str, default: Any, fits: Callable[[Any], Any], allowed: str) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where} has no {name!r}; {allowed} is needed there")
            return default
        if not fits(value):
            raise CheckpointError(f"{self.where}: {name}={value!r}; allowed: {allowed}")
        return value
