"""Every error a user can meet. Each message says what is wrong, what is allowed and what to do."""

from __future__ import annotations


class SpecdecError(ValueError):
    """Base of all errors raised for something a user can change."""


class ConfigError(SpecdecError):
    """An option is unknown, out of range or contradicts another one."""


class InputError(SpecdecError):
    """A prompt, a batch or a request cannot be generated from."""


class ModelLoadError(SpecdecError):
    """A model or tokenizer cannot be found, read or converted."""


class UnsupportedModelError(SpecdecError):
    """The model cannot run on this engine; the message names the feature."""


class CheckpointError(SpecdecError):
    """A drafter's checkpoint or a file of a training run cannot be read or written, or is not what it should be."""


class IncompatibleDrafterError(SpecdecError):
    """The drafter does not fit the target model."""


class OutOfCacheError(SpecdecError):
    """The KV cache cannot hold the request within its memory limit."""


class QueueFullError(SpecdecError):
    """As many requests wait as may; the request was not taken."""


class ModelOutputError(SpecdecError):
    """The target model produced NaN logits, so no token can be chosen."""


class ModelChangedError(SpecdecError):
    """The model's weights or modules have changed while requests run that began with the earlier ones."""


class WrongThreadError(SpecdecError):
    """An engine was used from a thread that does not own it."""
