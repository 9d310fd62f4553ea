"""Numbers by which a store of features knows the target that they are of: its name may come to mean other weights."""

from __future__ import annotations

from typing import Any

import torch

from specdec.models.taps import find_blocks, find_decoder

_PER_TENSOR = 4  # elements, spread over it
_TOLERANCE = 0.01  # relative: half precision and other devices stay inside, a fine-tuned copy does not


def sampled_weights(model: Any, num_layers: int) -> tuple[float, ...]:
    """Return some elements of the last block and of the norms behind it, () where they are no plain tensors."""
    decoder = find_decoder(model, num_layers)
    parameters = list(find_blocks(model, num_layers)[-1].parameters())
    for child in decoder.children():  # the final norm among others; a tied embedding adds nothing
        parameters += [p for p in child.parameters(recurse=False) if p.dim() == 1]
    if any(p.is_meta or not p.dtype.is_floating_point or p.numel() == 0 for p in parameters):
        return ()  # offloaded or quantised
    found: list[float] = []
    for parameter in parameters:
        flat = parameter.detach().flatten()
        at = torch.linspace(0, flat.numel() - 1, min(_PER_TENSOR, flat.numel()), device=flat.device).long()
        found += [float(f"{x:.4g}") for x in flat[at].to(torch.float32).tolist()]
    return tuple(found)


def same_weights(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Tell whether two samples are of one model. An empty one is unknown, and so no difference."""
    if not one or not other:
        return True
    if len(one) != len(other):
        return False
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=_TOLERANCE, atol=1e-6)
