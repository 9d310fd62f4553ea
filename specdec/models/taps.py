"""Hidden states on their way through a model: forward hooks on the decoder blocks of the runner's own clone."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import UnsupportedModelError
from specdec.interfaces import FeatureSpec


def find_blocks(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Return the ModuleList of decoder blocks: the one of length `num_layers` nearest the root.

    Raises:
        UnsupportedModelError: there is none.
    """
    # A multimodal model holds towers of blocks for images and sound beside the decoder's.
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    within = decoder if isinstance(decoder, nn.Module) else model
    found = [(name.count("."), m) for name, m in within.named_modules() if isinstance(m, nn.ModuleList)]
    for _, modules in sorted(found, key=lambda pair: pair[0]):
        if len(modules) == num_layers:
            return modules
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {num_layers} decoder blocks")


def find_decoder(model: nn.Module, num_layers: int) -> nn.Module:
    """Return the module that runs the decoder blocks and returns their normed output: the one that holds their list.

    It is not always `base_model`, which some classes do not call (OPT) or do not have (Llama 4).

    Raises:
        UnsupportedModelError: there is none.
    """
    blocks = find_blocks(model, num_layers)
    return next(module for module in model.modules() if any(child is blocks for child in module.children()))


class Taps:
    """Collects the outputs of chosen blocks during one forward."""

    def __init__(self, model: nn.Module, num_layers: int) -> None:
        self._model = model
        self._num_layers = num_layers
        self._hooks: dict[int, Any] = {}
        self._blocks: nn.ModuleList | None = None
        self._local = threading.local()  # programs are shared between threads, a forward is not

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Stay one object: hooks that a copied model takes along take nothing outside of this program's forward."""
        return self

    @property
    def _seen(self) -> dict[int, Tensor]:
        if not hasattr(self._local, "seen"):
            self._local.seen = {}
        return self._local.seen

    def prepare(self, spec: FeatureSpec) -> None:
        """Install what `spec` needs; an installed hook costs a dictionary write per forward."""
        self._seen.clear()
        if spec.layers and self._blocks is None:
            self._blocks = find_blocks(self._model, self._num_layers)
        for layer in spec.layers:
            if not 0 <= layer < self._num_layers:
                raise UnsupportedModelError(f"feature layer {layer} of a model with {self._num_layers} layers")
            if layer not in self._hooks:
                assert self._blocks is not None
                self._hooks[layer] = self._blocks[layer].register_forward_hook(self._catch(layer))
        if spec.final_norm and -1 not in self._hooks:
            decoder = find_decoder(self._model, self._num_layers)
            self._hooks[-1] = decoder.register_forward_hook(self._catch_last)

    def _catch(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._seen[layer] = hidden.reshape(-1, hidden.shape[-1])

        return hook

    def _catch_last(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
        width = self._model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        if not isinstance(hidden, Tensor) or hidden.shape[-1] != width:
            what = f"one of width {hidden.shape[-1]}" if isinstance(hidden, Tensor) else "none"
            raise UnsupportedModelError(
                f"the drafter wants the last hidden state of width {width}, and the {type(module).__name__} of "
                f"{type(self._model).__name__} gives {what}; use a drafter that needs none, such as 'suffix'"
            )
        self._seen[-1] = hidden.reshape(-1, hidden.shape[-1])

    def collect(self, spec: FeatureSpec) -> Tensor | None:
        """Return the features of the last forward, [T, F], in the order of `spec`.

        Raises:
            UnsupportedModelError: the model does not call the modules that they come out of.
        """
        if not spec:
            return None
        if not self._seen.keys() >= {*spec.layers, *([-1] if spec.final_norm else [])}:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not run its decoder blocks as modules, so its hidden states, which "
                "the drafter wants, cannot be seen"
            )
        parts = [self._seen[layer] for layer in spec.layers]
        if spec.final_norm:
            parts.append(self._seen[-1])
        self._seen.clear()
        return torch.cat([part.to(parts[-1].device) for part in parts], dim=-1)  # blocks may lie on several devices
