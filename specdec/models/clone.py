"""A private copy of a model's modules over the caller's own parameters, so that nothing of the caller's changes."""

from __future__ import annotations

import copy

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
    try:
        clone = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied ({error}); specdec runs a copy of the modules that shares the "
            "parameters, so every module must support copy.deepcopy"
        ) from error
    return clone.eval()


def fingerprint(model: nn.Module) -> tuple[int, ...]:
    """Return a value that changes when parameters are replaced, added or written in place.

    Writes through `.data` escape torch's version counters and are not seen.
    """
    return tuple(x for p in model.parameters() for x in (id(p), p.data_ptr(), _version(p)))


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version
