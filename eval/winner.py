"""The command that uses a point's settings: what an evaluation found out, said as something to run."""

from __future__ import annotations

import json
import shlex
from typing import Any

from omegaconf import OmegaConf

from specdec.build import split_options

_FLAGS = {
    "max_draft_tokens": "--max-draft-tokens",
    "draft_length": "--draft-length",
    "confidence_threshold": "--confidence-threshold",
}


def command_of(config: Any) -> str:
    """Return `specdec generate ...` and the same in Python, of the settings that are not the defaults.

    Args:
        config: with the groups target, drafter, verifier and engine.
    """
    groups: dict[str, Any] = {
        name: OmegaConf.to_container(config[name], resolve=True) for name in ("target", "drafter", "verifier", "engine")
    }  # not the whole: what is Hydra's own cannot be resolved outside of a job
    drafter, verifier = groups["drafter"], groups["verifier"]
    engine = _changed(groups["engine"])
    words = ["specdec", "generate", "--model", str(groups["target"]["name"])]
    if groups["target"]["dtype"] is not None:
        words += ["--dtype", str(groups["target"]["dtype"])]
    words += ["--drafter", drafter["name"], *_options("--drafter-option", drafter["options"])]
    if verifier["name"] != "auto":
        words += ["--verifier", verifier["name"], *_options("--verifier-option", verifier["options"])]
    for name, value in engine.items():
        if name in _FLAGS:
            words += [_FLAGS[name], str(value)]
    unsaid = ", ".join(name for name in engine if name not in _FLAGS)
    beside = f"   (without {unsaid}, for which the command has no option)" if unsaid else ""
    return f"  {shlex.join(words)} --prompt ...{beside}\n  specdec.LLM({_arguments(groups, engine)})"


def _changed(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the engine settings that are not the defaults of their dataclasses."""
    usual = split_options({})
    return {
        name: value
        for name, value in engine.items()
        if all(getattr(config, name, value) == value for config in usual) is False
    }


def _options(flag: str, options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        found += [flag, f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return found


def _arguments(groups: dict[str, Any], engine: dict[str, Any]) -> str:
    named: dict[str, Any] = {"dtype": groups["target"]["dtype"], "drafter": groups["drafter"]["name"]}
    named |= {"drafter_options": groups["drafter"]["options"]}
    if groups["verifier"]["name"] != "auto":
        named |= {"verifier": groups["verifier"]["name"], "verifier_options": groups["verifier"]["options"]}
    named |= engine
    told = {name: value for name, value in named.items() if value not in (None, {})}
    return ", ".join([repr(groups["target"]["name"]), *(f"{name}={value!r}" for name, value in told.items())])
