"""The target model of a measurement, loaded once per process however many points use it."""

from __future__ import annotations

import logging
from typing import Any

from specdec.api import LLM
from specdec.eval.llm_options import engine_options

log = logging.getLogger("specdec")

_loaded: dict[tuple[str, str], LLM] = {}  # the last one only: two may not fit into memory


def load_target(config: Any) -> LLM:
    """Return an undrafted LLM of the config's target and engine settings; its model is loaded if the last was another.

    Raises:
        CheckpointError: it cannot be loaded.
        ConfigError: an engine setting is unknown or out of range.
    """
    key = str(config.target.name), str(config.target.dtype)
    if key not in _loaded:
        _loaded.clear()
        log.info("loading the target %s", config.target.name)
        _loaded[key] = LLM(config.target.name, dtype=config.target.dtype)
    first = _loaded[key]
    return LLM(first.model, tokenizer=first.tokenizer, **engine_options(config))
