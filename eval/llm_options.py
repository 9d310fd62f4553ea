"""From a measurement's config groups to the keyword arguments of `LLM` and `Engine`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf

from specdec.registry import DRAFTERS, VERIFIERS, named_parameters, refuse_unknown


def llm_options(config: Any) -> dict[str, Any]:
    """Return what the groups engine, drafter and, where there is one, verifier say, and the target's dtype.

    Raises:
        ConfigError: the drafter or the verifier has no such option.
    """
    check_method_options(config)
    found = engine_options(config)
    found["dtype"] = config.target.dtype
    for group in ("drafter", "verifier"):
        if group in config:
            found[group] = config[group].name
            found[f"{group}_options"] = OmegaConf.to_container(config[group].options, resolve=True)
    return found


def engine_options(config: Any) -> dict[str, Any]:
    """Return what the group engine sets to something else than its default: a default is no wish of the user's."""
    given: dict[str, Any] = OmegaConf.to_container(config.engine, resolve=True) or {}
    schema = OmegaConf.get_type(config.engine)
    usual = {f.name: f.default for f in fields(schema)} if is_dataclass(schema) else {}
    return {name: value for name, value in given.items() if name not in usual or value != usual[name]}


def check_method_options(config: Any) -> None:
    """Raise ConfigError for an option that the config's drafter or verifier does not have, by its dotted name.

    Methods that are given as `package.module:Class` or as a head's folder check theirs when they are built.
    """
    for group, registry, reserved in (("drafter", DRAFTERS, 1), ("verifier", VERIFIERS, 0)):
        if group not in config or config[group].name not in registry.names():
            continue
        method = config[group]
        kind = registry.load(method.name)
        named = named_parameters(kind.build if group == "drafter" else kind, reserved)
        if named is not None:
            what, names = f"{group} {method.name!r}", [p.name for p in named]
            refuse_unknown(what, method.options, names, before=f"{group}.options.")
