"""The device that this process would run on, measured."""

from __future__ import annotations

import os

import torch

from specdec.errors import ConfigError
from specdec.models.dtypes import parse_dtype
from specdec.models.machine import matmul_flops_per_s, read_bandwidth_bytes_per_s
from specdec.planner.device import THIS, Device


def has_accelerator() -> bool:
    """Tell whether `this` is an accelerator, not the CPU."""
    return torch.cuda.is_available()


def this_device(dtype: str) -> Device:
    """Return the first CUDA device, else the CPU: its memory, read bandwidth and matmul rate. Takes seconds.

    Raises:
        ConfigError: it does not multiply in `dtype`.
    """
    place = torch.device("cuda" if has_accelerator() else "cpu")
    kind = parse_dtype(dtype)
    assert isinstance(kind, torch.dtype), "the planner knows its formats"
    try:
        rate = matmul_flops_per_s(kind, place)
    except RuntimeError as error:
        raise ConfigError(f"this machine does not multiply in {dtype}: {error}; give another --dtype") from error
    title = f"this machine's CPU, {torch.get_num_threads()} threads"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        title, memory = properties.name, properties.total_memory
    return Device(
        name=THIS,
        title=title,
        memory_bytes=memory,
        bandwidth_bytes_per_s=read_bandwidth_bytes_per_s(place),
        flops_per_s={dtype: rate},
        source="measured here, best of several",
        measured=True,
        is_cpu=place.type == "cpu",
    )
