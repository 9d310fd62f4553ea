"""The target model of a measurement, loaded once per process however many points use it."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch

from specdec.api import LLM
from specdec.eval.llm_options import engine_options
from specdec.eval.sources import digest_of

log = logging.getLogger("specdec")

_loaded: dict[tuple[str, str, str | None], LLM] = {}  # the last one only: two may not fit into memory


def load_target(config: Any) -> LLM:
    """Return an undrafted LLM of the config's target and engine settings; its model is loaded if the last was another.

    What earlier measurements of this process left behind, those that failed too, is given back first.

    Raises:
        CheckpointError: it cannot be loaded.
        ConfigError: an engine setting is unknown or out of range.
    """
    name = str(config.target.name)
    key = name, str(config.target.dtype), digest_of(name)  # other weights under the same name are another target
    if key not in _loaded:
        _loaded.clear()
    gc.collect()  # engines are in cycles: their caches would stay beside those of the next
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if key not in _loaded:
        log.info("loading the target %s", name)
        _loaded[key] = LLM(config.target.name, dtype=config.target.dtype)
    first = _loaded[key]
    return LLM(first.model, tokenizer=first.tokenizer, **engine_options(config))
