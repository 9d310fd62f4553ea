"""Exact, fast, batch-correct speculative decoding for Hugging Face causal LMs."""

from specdec.api import LLM, Completion, generate
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
    "SpecdecError",
    "UnsupportedModelError",
    "WrongThreadError",
    "generate",
]
