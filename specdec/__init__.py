"""Exact, fast, batch-correct speculative decoding for Hugging Face causal LMs."""

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.errors import (
    ConfigError,
    IncompatibleDrafterError,
    InputError,
    ModelChangedError,
    ModelLoadError,
    ModelOutputError,
    OutOfCacheError,
    QueueFullError,
    SpecdecError,
    UnsupportedModelError,
    WrongThreadError,
)

if TYPE_CHECKING:
    from specdec.api import LLM, Completion, Piece
    from specdec.check import check as check_model
    from specdec.check import check_pair
    from specdec.generation import custom_generate, generate
    from specdec.serving.engine import Engine
else:
    # Imported when first asked for: torch takes seconds, and the command line's help and completion do without.
    _HOMES = {
        "LLM": "specdec.api:LLM",
        "Engine": "specdec.serving.engine:Engine",
        "Completion": "specdec.api:Completion",
        "Piece": "specdec.api:Piece",
        "check_model": "specdec.check:check",
        "check_pair": "specdec.check:check_pair",
        "custom_generate": "specdec.generation:custom_generate",
        "generate": "specdec.generation:generate",
    }
    _SUBPACKAGES = ("check", "debug", "drafters", "verifiers")

    def __getattr__(name: str) -> object:
        if name in _SUBPACKAGES:
            return import_module(f"specdec.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home, _, attribute = _HOMES[name].partition(":")
        value = globals()[name] = getattr(import_module(home), attribute)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})


__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "Engine",
    "IncompatibleDrafterError",
    "InputError",
    "ModelChangedError",
    "ModelLoadError",
    "ModelOutputError",
    "OutOfCacheError",
    "Piece",
    "QueueFullError",
    "SpecdecError",
    "UnsupportedModelError",
    "WrongThreadError",
    "check_model",
    "check_pair",
    "custom_generate",
    "generate",
]
