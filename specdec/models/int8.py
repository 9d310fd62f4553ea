"""Linear layers in int8: weights per output channel, activations per token, outliers smoothed into the weights.

Source: Xiao et al. 2023, SmoothQuant, arXiv 2211.10438, eq. 4 with alpha = 0.5.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

ALPHA = 0.5
_LARGEST = 127.0


def smoothing_factors(activation_max: Tensor, weight: Tensor) -> Tensor:
    """Return [in] factors s: activations are divided by s and weights multiplied, so that both quantise well.

    Args:
        activation_max: [in] largest |input| per channel, from calibration.
        weight: [out, in].
    """
    weight_max = weight.abs().amax(dim=0).clamp_min(1e-5)
    return (activation_max.clamp_min(1e-5) ** ALPHA / weight_max ** (1 - ALPHA)).clamp(1e-4, 1e4)


class Int8Linear(nn.Module):
    """One or several Linear layers over the same input as one int8 product; the output has the input's dtype.

    The smoothing vector lives here and not in the layer before, because the value projection's output goes into a
    KV cache shared with the full-precision model.
    """

    def __init__(self, linears: Sequence[nn.Linear], activation_max: Tensor) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears]).float()
        smooth = smoothing_factors(activation_max.float(), weight)
        weight = weight * smooth
        self._unsmooth = 1.0 / smooth
        scales = (weight.abs().amax(dim=1) / _LARGEST).clamp_min(1e-12)
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases]).float()
        with warnings.catch_warnings():
            # torch announces the end of its eager quantisation front end; the kernels below stay in 2.x.
            warnings.simplefilter("ignore")
            zeros = torch.zeros_like(scales, dtype=torch.int64)
            quantised = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(quantised, bias)
        self.num_bytes = weight.numel() + scales.numel() * 8
        self._reduce_range = not has_wide_int8()

    def forward(self, x: Tensor) -> Tensor:
        smoothed = x.float() * self._unsmooth
        rows = smoothed.reshape(-1, smoothed.shape[-1])
        if rows.shape[0] == 1:
            out = torch.ops.quantized.linear_dynamic(rows, self._packed, self._reduce_range)
        else:
            # The kernel's activation scale is per tensor: row by row it is per token, and a request's draft does not
            # depend on its batch neighbours.
            out = torch.cat(
                [torch.ops.quantized.linear_dynamic(row, self._packed, self._reduce_range) for row in rows.split(1)]
            )
        return out.reshape(*x.shape[:-1], -1).to(x.dtype)


@cache
def has_wide_int8() -> bool:
    """Tell whether the CPU multiplies 8 x 8 bits into 32 without saturating at 16 (VNNI, ARM dot product).

    Without it the x86 kernels add pairs in 16 bits, and activations must be held to 7 bits.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(flag in text for flag in ("avx512_vnni", "avx_vnni", "asimddp"))


def activation_maxima(model: nn.Module, forward: object) -> dict[nn.Linear, Tensor]:
    """Return the largest |input| per channel [in] of every Linear of `model` while `forward()` runs it."""
    seen: dict[nn.Linear, Tensor] = {}

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        largest = args[0].detach().abs().reshape(-1, args[0].shape[-1]).amax(dim=0)
        seen[module] = torch.maximum(seen[module], largest) if module in seen else largest

    hooks = [m.register_forward_pre_hook(hook) for m in model.modules() if type(m) is nn.Linear]
    try:
        with torch.inference_mode():
            forward()  # type: ignore[operator]
    finally:
        for handle in hooks:
            handle.remove()
    return seen
