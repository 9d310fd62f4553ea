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
from specdec.kv.codecs import QuantisedKV
from specdec.models.int8_copy import calibration_ids
from specdec.models.runner import ModelRunner, Program

log = logging.getLogger("specdec")

_REQUEST_ID = 0
_SMOOTHING: weakref.WeakKeyDictionary[Program, Mapping[int, Tensor]] = weakref.WeakKeyDictionary()


def kv_codec(name: str, runner: ModelRunner, tokenizer: Any | None = None) -> QuantisedKV:
    """Return a codec with a model's own factors.

    Args:
        name: "int8" or "int4".
        runner: of the model.
        tokenizer: for the text that is calibrated on; without one the model's own samples are. Whoever asks first
            decides: what is stored must not depend on who uses a model later.
    """
    if runner.program not in _SMOOTHING:
        _SMOOTHING[runner.program] = _calibrate(name, runner, calibration_ids(runner, tokenizer))
    return QuantisedKV(name, _SMOOTHING[runner.program])


def _calibrate(name: str, runner: ModelRunner, ids: Tensor) -> dict[int, Tensor]:
    """Return layer -> [h, D] factors from the keys of `ids` [n, length], each row a text of its own."""
    log.debug("calibrating the KV cache's keys on %d tokens", ids.numel())
    exact = runner.sharing_cache(runner.program)
    exact.cache = KVCache()
    codec = QuantisedKV(name)
    keys: dict[int, list[Tensor]] = {}
    for row in ids:
        exact.cache.open(_REQUEST_ID, len(row))
        exact.cache.reserve(_REQUEST_ID, len(row))
        exact.forward([Segment(_REQUEST_ID, row, None, torch.zeros(1, dtype=torch.int64))])
        exact.cache.commit(_REQUEST_ID, torch.arange(len(row)))
        for layer in exact.cache.layers:
            keys.setdefault(layer, []).append(exact.cache.contents(_REQUEST_ID, layer)[0])
        exact.cache.release(_REQUEST_ID)
    for layer, parts in keys.items():
        codec.calibrate(layer, torch.cat(parts))
    return codec.smoothing
