"""Exact, fast, batch-correct speculative decoding for Hugging Face causal LMs."""

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.errors import (
    ConfigError,
    IncompatibleDrafterError,
    InputError,
    ModelLoadError,
    ModelOutputError,
    OutOfCacheError,
    SpecdecError,
    UnsupportedModelError,
    WrongThreadError,
)

if TYPE_CHECKING:
    from specdec.api import LLM, Completion, Piece
from specdec.check import check as check_model
from specdec.check import check_pair
    from specdec.generation import custom_generate, generate
else:
    # Imported when first asked for: torch takes seconds, and the command line's help and completion do without.
    _HOMES = {
        "LLM": "specdec.api",
        "Completion": "specdec.api",
        "Piece": "specdec.api",
        "custom_generate": "specdec.generation",
        "generate": "specdec.generation",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})


__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "IncompatibleDrafterError",
    "InputError",
    "ModelLoadError",
    "ModelOutputError",
    "OutOfCacheError",
    "Piece",
    "SpecdecError",
    "UnsupportedModelError",
    "WrongThreadError",
    "check_model",
    "check_pair",
    "custom_generate",
    "generate",
]
