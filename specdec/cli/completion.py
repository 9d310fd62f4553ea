"""What a shell completes values to. Nothing here may import torch: it runs at every press of the tab key."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from specdec.models.builtin import BUILTIN_MODELS
from specdec.planner.device import device_names
from specdec.planner.names import KV_BYTES, WEIGHT_BYTES
from specdec.registry import DRAFTERS, VERIFIERS

# Also in modules that import torch (`specdec.draft_length`, `specdec.train.jobs`, `specdec.models.dtypes`,
# `specdec.kv.codecs`); tests compare them.
DRAFT_LENGTHS = ("static", "confidence", "cost_aware")
TRAIN_METHODS = ("eagle3", "medusa", "draft_model")
QUANTISED_KV = ("int4", "int8")
DTYPES = ("auto", "bf16", "bfloat16", "float16", "float32", "float64", "fp16", "fp32", "fp64")


def drafters(incomplete: str) -> list[str]:
    """Return the names of drafters that `incomplete` begins."""
    return _beginning(incomplete, DRAFTERS.names())


def verifiers(incomplete: str) -> list[str]:
    """Return the names of verifiers that `incomplete` begins."""
    return _beginning(incomplete, [*VERIFIERS.also, *VERIFIERS.names()])


def draft_lengths(incomplete: str) -> list[str]:
    """Return the names of policies of draft length that `incomplete` begins."""
    return _beginning(incomplete, DRAFT_LENGTHS)


def dtypes(incomplete: str) -> list[str]:
    """Return the names of weight types that `incomplete` begins."""
    return _beginning(incomplete, DTYPES)


def devices(incomplete: str) -> list[str]:
    """Return the devices that `specdec plan` knows whose names `incomplete` begins."""
    return _beginning(incomplete, device_names())


def planned_dtypes(incomplete: str) -> list[str]:
    """Return the weight types that `specdec plan` takes whose names `incomplete` begins."""
    return _beginning(incomplete, ("auto", *WEIGHT_BYTES))


def kv_dtypes(incomplete: str) -> list[str]:
    """Return the types of keys and values that `specdec plan` takes whose names `incomplete` begins."""
    return _beginning(incomplete, ("auto", *KV_BYTES))


def quantised_kv(incomplete: str) -> list[str]:
    """Return the ways to store keys and values in fewer bits whose names `incomplete` begins."""
    return _beginning(incomplete, QUANTISED_KV)


def train_methods(incomplete: str) -> list[str]:
    """Return the drafters that can be trained whose names `incomplete` begins."""
    return _beginning(incomplete, TRAIN_METHODS)


def recipes(incomplete: str) -> list[str]:
    """Return the names of training recipes that `incomplete` begins."""
    files = (entry.name for entry in (resources.files("specdec") / "configs" / "train").iterdir())
    names = sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))
    return _beginning(incomplete, (name for name in names if name not in TRAIN_METHODS))


def models(incomplete: str) -> list[str]:
    """Return built-in names, and the local directories and .gguf files that `incomplete` begins."""
    folder, _, start = incomplete.rpartition("/")
    here = Path(folder or ("/" if incomplete.startswith("/") else ".")).expanduser()
    found = []
    try:
        for path in sorted(here.iterdir()):
            hidden = path.name.startswith(".") and not start.startswith(".")
            if path.name.startswith(start) and not hidden and (path.is_dir() or path.suffix.lower() == ".gguf"):
                found.append(incomplete[: len(incomplete) - len(start)] + path.name + "/" * path.is_dir())
    except OSError:
        pass  # no such directory, or none to be read
    return [*_beginning(incomplete, BUILTIN_MODELS), *found]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
