"""Lazy name -> "module:attribute" tables. Names the built-in drafters and verifiers without importing them."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from importlib.metadata import entry_points
from typing import Any

from specdec.errors import ConfigError


class Registry:
    """One table of plug-ins of a kind.

    A name is looked up in the table, then as `package.module:Attribute`, then among the installed entry points
    of `group`.
    """

    def __init__(self, kind: str, group: str, table: dict[str, str], also: tuple[str, ...] = ()) -> None:
        """`also`: names that callers take but that stand for no one entry, for messages about unknown names."""
        self.kind, self.group, self.table, self.also = kind, group, dict(table), also

    def names(self) -> list[str]:
        return sorted({*self.table, *(point.name for point in entry_points(group=self.group))})

    def load(self, name: str) -> Any:
        """Return the object registered under `name`.

        Raises:
            ConfigError: the name is unknown or cannot be imported.
        """
        target = self.table.get(name)
        if target is None and ":" in name:
            target = name
        if target is None:
            for point in entry_points(group=self.group):
                if point.name == name:
                    return point.load()
            names = [*self.also, *self.names()]
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"unknown {self.kind} {name!r};{hint} available: {', '.join(names)}; "
                f"your own: 'package.module:Class' or an entry point in {self.group!r}"
            )
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.kind} {name!r} cannot be imported from {target!r}: {error}") from error


def refuse_unknown(what: str, given: Iterable[str], allowed: Iterable[str], before: str = "") -> None:
    """Raise ConfigError naming the first of `given` that is not `allowed`, with the nearest that is.

    `before` is put before every option's name, where the user writes it so.
    """
    names = sorted(allowed)
    for key in given:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f" did you mean {before + close[0]!r}?" if close else ""
            available = ", ".join(before + name for name in names) or "none"
            raise ConfigError(f"{what} has no option {f'{before}{key}'!r};{hint} available: {available}")


def named_parameters(function: Callable[..., Any], reserved: int = 0) -> list[inspect.Parameter] | None:
    """Return the keyword parameters of `function` behind its first `reserved` ones, or None if it takes any."""
    parameters = list(inspect.signature(function).parameters.values())[reserved:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def check_options(what: str, function: Callable[..., Any], options: Collection[str], reserved: int = 0) -> None:
    """Raise ConfigError unless `options` can be given to `function`; its first `reserved` parameters are ours."""
    named = named_parameters(function, reserved)
    if named is None:
        return
    refuse_unknown(what, options, (p.name for p in named))
    missing = next((p.name for p in named if p.default is p.empty and p.name not in options), None)
    if missing is not None:
        raise ConfigError(f"{what} needs the option {missing!r}")


DRAFTERS = Registry(
    "drafter",
    "specdec.drafters",
    {
        "none": "specdec.drafters.none:NoneDrafter",
        "ngram": "specdec.drafters.ngram:NgramDrafter",
        "suffix": "specdec.drafters.suffix:SuffixDrafter",
        "token_recycling": "specdec.drafters.token_recycling:TokenRecyclingDrafter",
        "draft_model": "specdec.drafters.draft_model:DraftModelDrafter",
        "self_int8": "specdec.drafters.self_int8:SelfInt8Drafter",
        "early_exit": "specdec.drafters.early_exit:EarlyExitDrafter",
        "medusa": "specdec.drafters.medusa:MedusaDrafter",
        "eagle": "specdec.drafters.eagle:EagleDrafter",
        "eagle3": "specdec.drafters.eagle:Eagle3Drafter",
        "oracle": "specdec.drafters.testing:OracleDrafter",
        "adversary": "specdec.drafters.testing:AdversaryDrafter",
        "scripted": "specdec.drafters.testing:ScriptedDrafter",
        "random": "specdec.drafters.testing:RandomDrafter",
    },
)
VERIFIERS = Registry(
    "verifier",
    "specdec.verifiers",
    {
        "match": "specdec.verifiers.match:MatchVerifier",
        "rejection": "specdec.verifiers.rejection:RejectionVerifier",
        "traversal": "specdec.verifiers.traversal:TraversalVerifier",
        "typical": "specdec.verifiers.typical:TypicalVerifier",
        "relaxed": "specdec.verifiers.relaxed:RelaxedVerifier",
        "synthetic": "specdec.verifiers.synthetic:SyntheticVerifier",
    },
    also=("auto",),
)
