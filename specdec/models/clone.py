"""A private copy of a model's modules over the caller's own parameters, so that nothing of the caller's changes."""

from __future__ import annotations

import copy

import torch
from torch import nn

from specdec.errors import UnsupportedModelError


def clone_sharing_parameters(model: nn.Module) -> nn.Module:
    """Return a deep copy of `model` in eval mode whose parameters and buffers ARE the caller's.

    Modules, configs and hooks are copied, tensors are not: the copy may get another attention implementation,
    hooks and replaced Linear layers at no cost in memory.

    Raises:
        UnsupportedModelError: the model holds something that cannot be copied.
    """
    memo: dict[int, object] = {id(p): p for p in model.parameters()}
    memo.update({id(b): b for b in model.buffers()})
    for module in model.modules():
        # Accelerate's hooks hold offloaded weights, which are no parameters and just as little to be copied.
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if weights is not None:
            memo[id(weights)] = weights
    try:
        clone = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied ({error}); specdec runs a copy of the modules that shares the "
            "parameters, so every module must support copy.deepcopy"
        ) from error
    return clone.eval()


def device_of(model: nn.Module) -> torch.device:
    """Return where a model's inputs go; weights that Accelerate has offloaded say nothing about it."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Return a value that changes when parameters are replaced, added or written, or modules or hooks change.

    Writes through `.data` escape torch's version counters; on the CPU one value in the middle of each parameter is
    looked at, so they are seen if they change that one.
    """
    weights = tuple((id(p), p.data_ptr(), _version(p), _sample(p)) for p in model.parameters())
    modules = tuple((id(m), *m._forward_hooks, *m._forward_pre_hooks) for m in model.modules())
    return weights, modules


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version


def _sample(parameter: nn.Parameter) -> float | None:
    if parameter.device.type != "cpu" or not parameter.is_contiguous() or parameter.numel() == 0:
        return None  # elsewhere a look would wait for the device
    value = float(parameter.detach().view(-1)[parameter.numel() // 2])
    return None if value != value else value  # NaN is not equal to itself
