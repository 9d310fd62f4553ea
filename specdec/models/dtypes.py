"""Names of weight types and devices, and what is used when none is given."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import torch

from specdec.errors import ConfigError

_NAMES: dict[str, torch.dtype | Literal["auto"]] = {
    "auto": "auto",
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | Literal["auto"]:
    """Return the floating-point type a user named; "auto" is the checkpoint's own.

    Raises:
        ConfigError: the name is unknown or the type is no floating-point type.
    """
    if isinstance(dtype, torch.dtype):
        if dtype in _NAMES.values():
            return dtype
        raise ConfigError(f"dtype {dtype} cannot hold a model's weights; available: {', '.join(_NAMES)}")
    name = str(dtype).strip().lower().removeprefix("torch.")
    if name in _NAMES:
        return _NAMES[name]
    close = difflib.get_close_matches(name, _NAMES, n=1)
    hint = f" did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"unknown dtype {dtype!r};{hint} available: {', '.join(_NAMES)}")


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device a user named, after using it once.

    Raises:
        ConfigError: the name is unknown or the device cannot be used here.
    """
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, TypeError) as error:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        available = "cpu" if accelerator is None else f"cpu, {accelerator.type}"
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"device {str(device)!r} cannot be used: {reason}; available: {available}") from error
    return parsed


def default_dtype(device: torch.device | None, device_map: Any | None) -> torch.dtype | Literal["auto"]:
    """Return float32 for a model that will sit on the CPU, else "auto"."""
    if device_map is None:
        on_cpu = device is None or device.type == "cpu"
    elif isinstance(device_map, dict):
        on_cpu = all(str(place) in ("cpu", "disk") for place in device_map.values())
    else:
        on_cpu = str(device_map) == "cpu" or not torch.accelerator.is_available()
    return torch.float32 if on_cpu else "auto"
