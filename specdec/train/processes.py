"""The processes of one run under `accelerate launch`; without it there is one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")

# One process may answer prompts for hours longer than another one.
_PATIENCE = timedelta(days=7)


def processes() -> PartialState:
    """Return the state that all of Accelerate shares, which the first call makes."""
    if PartialState._shared_state:
        return PartialState()
    # Without this word Accelerate takes processes on CPUs for strangers.
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not has_accelerator(), timeout=_PATIENCE)


def has_accelerator() -> bool:
    """Tell whether torch has a device other than the CPU here."""
    return torch.accelerator.is_available()


def accelerator(precision: str) -> Accelerator:
    """Return an Accelerator; a process may train at one precision and then at another."""
    processes()
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()
    return Accelerator(mixed_precision=precision)


def send_trained_only(module: nn.Module) -> None:
    """Keep what is frozen out of what processes tell each other: rows of the target, which all of them have."""
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    frozen += [name for name, _ in module.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, frozen)


def share_of(things: Sequence[T]) -> list[T]:
    """Return this process's share of some things."""
    state = processes()
    return list(things[state.process_index :: state.num_processes])


def main_says(flag: bool) -> bool:
    """Return the main process's flag in every process. All must ask: clocks and signals differ between them."""
    if processes().num_processes == 1:
        return flag
    said = [flag]
    broadcast_object_list(said)
    return said[0]


def load_device() -> torch.device | None:
    """Return where this process's models go; None = the CPU, which is the loader's own default."""
    device: torch.device = processes().device
    return None if device.type == "cpu" else device
