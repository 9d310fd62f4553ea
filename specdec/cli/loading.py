"""From what was typed to an LLM, with a line that says what the wait is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.progress import LogView
from specdec.errors import ConfigError, InputError
from specdec.models.builtin import BUILTIN_MODELS

if TYPE_CHECKING:
    from specdec.api import LLM
    from specdec.interfaces import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


def is_local(model: str) -> bool:
    """Tell whether loading needs no download, which draws bars of its own."""
    return model in BUILTIN_MODELS or Path(model).expanduser().exists()


def sampling_of(options: dict[str, Any]) -> SamplingParams:
    """Return the sampling part of the options given for `LLM.generate`, checked before a model is loaded for minutes.

    Raises:
        ConfigError: a value is out of range.
    """
    from specdec.interfaces import SamplingParams
    from specdec.sampling import check_sampling

    sampling = SamplingParams(**{name: value for name, value in options.items() if name in SAMPLING})
    check_sampling(sampling)
    return sampling


def load(view: LogView, model: str, drafter: str, sampling: SamplingParams, options: dict[str, Any]) -> LLM:
    """Return the LLM; `options` are further ones of its own.

    Raises:
        SpecdecError: the model, the drafter or an option is refused, or there is no tokenizer.
    """
    quiet_transformers()
    with view.doing(f"loading {model} with drafter {drafter}", spin=is_local(model)):
        from specdec.api import LLM
        from specdec.sampling import warn_ignored

        warn_ignored(sampling)
        llm = LLM(model, drafter=drafter, **options)
    if llm.tokenizer is None:
        raise InputError("the model came without a tokenizer, so there is no text to begin from; use specdec.generate")
    return llm


def quiet_transformers() -> None:
    """Keep transformers' own advice off the terminal."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()


def chat_ids(llm: LLM, messages: list[dict[str, Any]], instead: str) -> list[int]:
    """Return the prompt ids of a conversation; `instead` is what to do without a chat template.

    Raises:
        ConfigError: the model has no chat template.
        InputError: the template does not take the messages.
    """
    if not getattr(llm.tokenizer, "chat_template", None):
        raise ConfigError(f"the model has no chat template; {instead}")
    return llm.chat_token_ids(messages)
