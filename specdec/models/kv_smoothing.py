"""The factors by which a model's keys are smoothed before they are quantised: constants, calibrated once per model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.interfaces import Segment
from specdec.kv.cache import KVCache
from specdec.kv.codecs import QuantisedKV, channel_factors
from specdec.models.int8_copy import Calibration, calibration_of
from specdec.models.runner import ModelRunner, Program

log = logging.getLogger("specdec")

_REQUEST_ID = 0
_SMOOTHING: weakref.WeakKeyDictionary[Program, dict[Calibration, Mapping[int, Tensor]]] = weakref.WeakKeyDictionary()


def kv_codec(name: str, runner: ModelRunner, tokenizer: Any | None = None) -> QuantisedKV:
    """Return a codec with a model's own factors.

    They follow from the model and from what is calibrated on, never from who asked for them before.

    Args:
        name: "int8" or "int4".
        runner: of the model.
        tokenizer: for the text that is calibrated on; without one the model's own samples are.
    """
    known = _SMOOTHING.setdefault(runner.program, {})
    calibration = calibration_of(runner, tokenizer)
    if calibration not in known:
        known[calibration] = _factors(runner, calibration.ids(runner))
    return QuantisedKV(name, known[calibration])


def _factors(runner: ModelRunner, ids: Tensor) -> dict[int, Tensor]:
    """Return layer -> [h, D] factors from the keys of `ids` [n, length], each row a text of its own."""
    log.debug("calibrating the KV cache's keys on %d tokens", ids.numel())
    exact = runner.with_cache(KVCache())
    keys: dict[int, list[Tensor]] = {}
    for row in ids:
        exact.cache.open(_REQUEST_ID, len(row))
        exact.cache.reserve(_REQUEST_ID, len(row))
        exact.forward([Segment(_REQUEST_ID, row, None, torch.zeros(1, dtype=torch.int64))])
        exact.cache.commit(_REQUEST_ID, torch.arange(len(row)))
        for layer in exact.cache.layers:
            keys.setdefault(layer, []).append(exact.cache.contents(_REQUEST_ID, layer)[0])
        exact.cache.release(_REQUEST_ID)
    return {layer: channel_factors(torch.cat(parts)) for layer, parts in keys.items()}
