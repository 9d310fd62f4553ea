"""A private copy of a model's modules over the caller's own weights, so that nothing of the caller's changes."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.errors import UnsupportedModelError

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.FunctionType, torch.dtype)
# What every module has: told apart by identity, hooks and parameters, or without meaning for the clone.
_BOOKKEEPING = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, str)
_NUM_SAMPLES = 16


def clone_sharing_parameters(model: nn.Module, instead: Sequence[tuple[Any, Any]] = ()) -> nn.Module:
    """Return a deep copy of `model` in eval mode over the caller's weights.

    Modules, configs and hooks are copied, the data of tensors is not, wherever they are kept: the copy may get another
    attention implementation, hooks and replaced Linear layers at no cost in memory, quantised weights included.

    Args:
        model: whose modules are copied.
        instead: pairs of an object within the model and what stands in the copy for it.

    Raises:
        UnsupportedModelError: the model holds something that cannot be copied.
    """
    memo, own = _shared(model)
    memo.update((id(theirs), ours) for theirs, ours in instead)
    try:
        clone = copy.deepcopy(model, memo)
        for theirs, ours in own:
            ours.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(theirs).items()})
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied ({error}); specdec runs a copy of the modules that shares the "
            "parameters, so every module must support copy.deepcopy"
        ) from error
    return clone.eval()


def _shared(model: nn.Module) -> tuple[dict[int, Any], list[tuple[Tensor, Tensor]]]:
    """Return a deepcopy memo that holds every tensor of a model, and the parameters that it replaces by our own."""
    memo: dict[int, Any] = {}
    own: list[tuple[Tensor, Tensor]] = []
    waiting: list[Any] = [model]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            memo[id(value)] = ours = _own_parameter(value)
            if ours is not value:
                own.append((value, ours))
        elif isinstance(value, torch.ScriptObject):  # packed weights of torch's own quantised layers
            memo[id(value)] = value
            continue
        # Accelerate's hooks hold offloaded weights, which are no parameters and just as little to be copied.
        weights = (
            getattr(getattr(value, "_hf_hook", None), "weights_map", None) if isinstance(value, nn.Module) else None
        )
        if weights is not None:
            memo[id(weights)] = weights
        waiting.extend(_members(value))
    return memo, own


def _members(value: Any) -> list[Any]:
    """Return what an object refers to, as far as deepcopy would follow it."""
    if isinstance(value, functools.partial):
        return [*value.args, *value.keywords.values()]
    members = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, dict):
        members += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        members += value
    return members


def _own_parameter(tensor: Tensor) -> Tensor:
    """Return a parameter of our own over the same storage; other tensors as they are.

    A forward may rebind a parameter's data or what its class keeps beside it: layers of bitsandbytes move scales out of
    it at the first call, parametrisations set it. The caller's parameter must not see that.
    """
    if not isinstance(tensor, nn.Parameter) or wraps_tensors(tensor):
        return tensor
    if type(tensor) is nn.Parameter:
        return nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
    ours: Tensor = torch.Tensor._make_subclass(type(tensor), tensor.data, tensor.requires_grad)
    return ours


def wraps_tensors(tensor: Tensor) -> bool:
    """Tell whether a tensor holds others instead of storage of its own, as some libraries' quantised weights do."""
    return bool(is_traceable_wrapper_subclass(tensor))


def device_of(model: nn.Module) -> torch.device:
    """Return where a model's inputs go; weights that Accelerate has offloaded say nothing about it."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Return a value that changes with the weights, the modules, their hooks and their settings.

    Settings are the numbers, texts and flags that modules keep, such as which adapter is active, disabled or merged.
    Writes through `.data` escape torch's version counters; on the CPU a few values spread over each parameter are
    looked at, so writes are seen that change one of those, as arithmetic on a whole parameter does. A write of single
    rows may not be: do it without `.data`, under torch.no_grad().
    """
    weights = tuple(_look(t) for t in (*model.parameters(), *model.buffers()))
    modules = tuple(
        (
            id(m),
            type(m),
            id(vars(m).get("forward")),
            tuple(map(id, m._modules.values())),
            *m._forward_hooks,
            *m._forward_pre_hooks,
            _settings(m),
        )
        for m in model.modules()
    )
    return weights, modules


def _look(tensor: Tensor) -> tuple[object, ...]:
    """Return what can be told of a parameter or buffer without reading all of it."""
    if wraps_tensors(tensor):
        return id(tensor), _version(tensor)
    return id(tensor), tensor.data_ptr(), _version(tensor), _sample(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> object:
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return None  # elsewhere a look would wait for the device
    flat = tensor.detach().view(-1)
    step = max(1, len(flat) // _NUM_SAMPLES)
    return tuple(x if x == x else None for x in flat[step // 2 :: step].tolist())  # NaN is not equal to itself


def _settings(module: nn.Module) -> tuple[object, ...]:
    found = ((k, _plain(v)) for k, v in vars(module).items() if k not in _BOOKKEEPING)
    return tuple((k, v) for k, v in found if v is not None)


def _plain(value: object) -> object:
    """Return a hashable picture of numbers, texts and flags and of containers of those; None of anything else."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return tuple(_plain(item) for item in value)  # type: ignore[attr-defined]
    if kind is dict:
        return tuple((str(key), _plain(item)) for key, item in value.items())  # type: ignore[attr-defined]
    return None
