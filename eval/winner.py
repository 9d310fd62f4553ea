"""The command that uses a point's settings: what an evaluation found out, said as something to run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from specdec.build import split_options
from specdec.eval.comparison import ComparisonConfig

_FLAGS = {
    "max_draft_tokens": "--max-draft-tokens",
    "draft_length": "--draft-length",
    "confidence_threshold": "--confidence-threshold",
}
_SAMPLING = ("temperature", "seed", "ignore_eos")  # of generate() and of the command, by the same names
_OF_SWEEPS = ("experiment", "name")  # keys that other measurements do not have


def command_of(config: Any, words: Sequence[str]) -> str:
    """Return `specdec generate ...`, the same in Python and the measurement, of the settings that are not the defaults.

    Args:
        config: with the groups target, drafter, verifier and engine, and what comparison.yaml has.
        words: the overrides that made it.
    """
    groups: dict[str, Any] = {
        name: OmegaConf.to_container(config[name], resolve=True) for name in ("target", "drafter", "verifier", "engine")
    }  # not the whole: what is Hydra's own cannot be resolved outside of a job
    drafter, verifier = groups["drafter"], groups["verifier"]
    engine = _changed(groups["engine"])
    usual = ComparisonConfig()
    sampling = {name: config[name] for name in _SAMPLING if config[name] != getattr(usual, name)}
    line = ["specdec", "generate", "--model", str(groups["target"]["name"])]
    if groups["target"]["dtype"] is not None:
        line += ["--dtype", str(groups["target"]["dtype"])]
    line += ["--drafter", drafter["name"], *_options("--drafter-option", drafter["options"])]
    if verifier["name"] != "auto":
        line += ["--verifier", verifier["name"], *_options("--verifier-option", verifier["options"])]
    for name, value in engine.items():
        if name in _FLAGS:
            line += [_FLAGS[name], str(value)]
    for name, value in sampling.items():
        line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    unsaid = ", ".join(name for name in engine if name not in _FLAGS)
    beside = f"   (without {unsaid}, for which the command has no option)" if unsaid else ""
    call = "".join(f", {name}={value!r}" for name, value in sampling.items())
    again = [word for word in words if word.lstrip("+").partition("=")[0] not in _OF_SWEEPS]
    return (
        f"  {shlex.join(line)} --prompt ...{beside}\n"
        f"  specdec.LLM({_arguments(groups, engine)}).generate(...{call})\n"
        f"  {shlex.join(['specdec', 'eval', 'speedup', *again])}"
    )


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
