"""Verdicts of the shrunk probe, kept on disk: an architecture is tried once per version of the libraries."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specdec.models.cache_dir import atomic_write_json, cache_dir, ensure_cache_dir
from specdec.models.compatibility import find_refusal
from specdec.models.probe import Compatibility, Verdict, not_shrunk, probe_small, refused
from specdec.models.shrink import shrink

log = logging.getLogger("specdec")

_FOLDER = "compatibility"
_DISTRIBUTION = "torch-specdec"


def verdict_of(config: Any, model_class: Any = None) -> Compatibility:
    """Return the verdict on an architecture: static gate, then the shrunk probe, or what it found before.

    What is kept belongs to the shrunk config, so that models that differ in size only share it, and to the versions
    of torch, transformers and specdec. A damaged file is replaced; without a writable cache directory the probe,
    some 50 ms, runs every time.

    Args:
        config: of the whole model.
        model_class: the model's own class; None = transformers' causal LM for the config.
    """
    try:
        tried = class_to_try(config, model_class)
        refusal = find_refusal(config, tried if model_class is None else model_class)
        if refusal is not None:
            return refused(refusal)
        small = shrink(config)
        key = _key(small, tried)
    except Exception as error:  # configs are code of their own
        refusal = find_refusal(config)
        return not_shrunk(error) if refusal is None else refused(refusal)
    path = cache_dir() / _FOLDER / f"{small.model_type}-{_digest(key)}.json"
    kept = _read(path, key)
    if kept is not None:
        return kept
    found = probe_small(small, tried)
    if found.verdict != "unknown":  # what could not be tried may be tried again
        _write(path, key, found)
    return found


def class_to_try(config: Any, model_class: Any) -> Any:
    """Return the causal LM of the config's text part; the model's own class where the config has but one part."""
    text = config.get_text_config()
    if model_class is not None and text is config:
        return model_class
    for kind in (type(text), type(config)):
        found = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
        if found is not None and issubclass(type(text), found.config_class):
            return found
    raise ValueError(f"transformers has no causal language model for a {type(text).__name__} alone")


def _key(small: Any, model_class: Any) -> dict[str, Any]:
    return {
        "class": f"{model_class.__module__}.{model_class.__qualname__}",
        "config": json.loads(json.dumps(small.to_dict(), sort_keys=True, default=str)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specdec": f"{version(_DISTRIBUTION)} {_sources()}",
    }


@cache
def _sources() -> str:
    """Return a digest of the code that the verdict is about; the version stands still while it is worked on."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted([*package.glob("models/*.py"), *package.glob("kv/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(key: dict[str, Any]) -> str:
    """Return a name for the architecture; the versions are inside of the file, so that old ones do not pile up."""
    return hashlib.sha256(json.dumps([key["class"], key["config"]], sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path, key: dict[str, Any]) -> Compatibility | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = Compatibility(**stored["found"])
        return found if stored["key"] == key and found.verdict in get_args(Verdict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, unreadable or damaged: tried again


def _write(path: Path, key: dict[str, Any], found: Compatibility) -> None:
    try:
        ensure_cache_dir(_FOLDER)
        atomic_write_json(path, {"key": key, "found": found.to_dict()})
    except (OSError, ValueError) as error:  # ModelLoadError is a ValueError
        log.info("the verdict on %s could not be kept: %s", key["class"], error)
