"""Which models are quantised, and how: what follows for running them exactly.

A step runs one row per draft token beside the rows of other requests. Weight-only quantisation computes each row by
itself, so it runs; where activations are quantised with one scale for all rows, a row depends on its neighbours.

On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights in a layer's first forward. Of a model that has run, the
engine's copy shares the repacked weights; of one that has not, it makes its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec.models.clone import wraps_tensors

# Layers of torch.ao's eager "dynamic" quantisation share one activation scale among all rows of a call.
_DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.nn.quantized.dynamic")
_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32)  # int64 holds positions, bool masks
_FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


def quantisation_of(model: Any) -> str | None:
    """Return the name of the method a model's weights are quantised with, or None.

    Asks the modules, not the config: a config may keep a quantization_config of weights that were dequantised.
    """
    layer = next((m for m in model.modules() if _is_quantised(m)), None)
    if layer is None:
        return None
    declared: Any = getattr(model.config, "quantization_config", None)
    method = declared.get("quant_method") if isinstance(declared, dict) else getattr(declared, "quant_method", None)
    library = type(layer).__module__.partition(".")[0]
    named = str(getattr(method, "value", method)) if method else library
    return f"{named}, {type(layer).__name__} layers"


def _is_quantised(module: nn.Module) -> bool:
    if _is_torch_quantised(module):
        return True
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(_is_code(tensor) for tensor in own)


def _is_torch_quantised(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized"))


def _is_code(tensor: Tensor) -> bool:
    """Tell whether a parameter or buffer holds quantised weights: a matrix of integers, or a tensor that wraps one."""
    if wraps_tensors(tensor):
        return not type(tensor).__module__.startswith("torch.distributed")
    return tensor.dim() >= 2 and (tensor.dtype in _FLOAT8 or tensor.dtype in _CODES)


def coupled_rows(model: nn.Module) -> str | None:
    """Return what makes rows of one forward depend on each other, with what to do, or None."""
    for module in model.modules():
        if type(module).__module__.startswith(_DYNAMIC):
            return (
                "torch's dynamic quantisation, whose activation scale is shared by all rows of a step, so that a "
                "token would depend on what is drafted beside it (quantise the weights only)"
            )
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        if type(module).__name__ == "Linear8bitLt" and threshold:
            return (
                f"LLM.int8() with llm_int8_threshold={threshold}, whose outlier columns are chosen over all rows of "
                "a step, so that a token would depend on what is drafted beside it (load it with "
                "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits)"
            )
    return None
