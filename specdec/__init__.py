"""Exact, fast, batch-correct speculative decoding for Hugging Face causal LMs."""

from specdec.api import LLM, Completion, Piece
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
from specdec.generation import custom_generate, generate

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
    "custom_generate",
    "generate",
]
