"""How keys and values are stored: int8 or int4 codes with a scale per token and head.

Letters: m rows, h key/value heads, D key width, E value width, W either of them.

    x = code * scale,  scale = max |x| over the row's channels / L,  L = 127 or 7

Keys have channels that are always large, which one scale per row would let drown the others; they are divided by a
factor per channel first, a constant of the model, and multiplied by it when they are read. Every row is encoded by
itself and with constants only, so what is stored does not depend on the chunk, the batch or the block it came with, and
moving rows moves bits.

Both directions compute in float32 (models in float64: in float64) and with the same factors; what is read is rounded to
the model's dtype once. A row of a head in which a number is not finite is read as NaN altogether: it is not hidden, as
it would not be by exact KV, and does not reach other heads or tokens.

Source: per-channel smoothing of keys: Liu et al. 2024, KIVI, arXiv 2402.02750 (outlier channels of keys); static
factors folded out before quantising: Xiao et al. 2023, SmoothQuant, arXiv 2211.10438.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.errors import ConfigError

# A float's range in two bytes: at a head width of 64, int8 with its scales takes 66 of 128 bytes of bfloat16.
SCALE_DTYPE = torch.bfloat16
_TINY = 1e-30
# Of a head's largest channel: what a channel that was silent in the calibration may at least say later.
_LEAST_FACTOR = 1e-4


class Codec(Protocol):
    """Encodes rows of keys and values, and decodes what it stored."""

    name: str

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Return what is stored of k [m, h, D] and v [m, h, E]: tensors [m, ...]."""
        ...

    def decode(self, layer: int, stored: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys [m, h, D] and values [m, h, E] in `dtype`."""
        ...


class QuantisedKV:
    """Symmetric integers per token and head; int4 codes are packed two per byte.

    Args:
        name: "int8" or "int4".
        smoothing: layer -> [h, D] factors of the keys' channels, > 0; layers without have none.
    """

    def __init__(self, name: str, smoothing: Mapping[int, Tensor] | None = None) -> None:
        if name not in LARGEST:
            raise _unknown(name)
        self.name = name
        self._largest = LARGEST[name]
        self._smoothing: dict[int, Tensor] = {}
        self._as_used: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}  # the factors, wide, where keys are
        self._widths: dict[int, tuple[int, int]] = {}  # layer -> (D, E): packing hides the parity of a width
        for layer, factors in (smoothing or {}).items():
            self._set(layer, factors)

    def _set(self, layer: int, factors: Tensor) -> None:
        assert factors.dim() == 2 and bool((factors > 0).all()), "smoothing factors are [h, D] and > 0"
        self._smoothing[layer] = factors.detach().float().cpu()
        self._as_used = {key: t for key, t in self._as_used.items() if key[0] != layer}

    def calibrate(self, layer: int, keys: Tensor) -> None:
        """Take a layer's factors from keys [n, h, D]: see `channel_factors`."""
        self._set(layer, channel_factors(keys))

    @property
    def smoothing(self) -> dict[int, Tensor]:
        """Return the factors by layer, [h, D] each."""
        return dict(self._smoothing)

    def _factors(self, layer: int, wide: torch.dtype, device: torch.device) -> Tensor | None:
        if layer not in self._smoothing:
            return None
        key = (layer, wide, device)
        if key not in self._as_used:
            self._as_used[key] = self._smoothing[layer].to(device, wide)
        return self._as_used[key]

    def encode(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return codes of keys [m, h, D] and their scales [m, h], then codes and scales of values; see `Codec`."""
        wide = _wide(k.dtype)
        self._widths[layer] = (k.shape[-1], v.shape[-1])
        factors = self._factors(layer, wide, k.device)
        keys = k.to(wide) if factors is None else k.to(wide) / factors
        return (*self._quantise(keys), *self._quantise(v.to(wide)))

    def _quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Codes are taken with the scale as it is stored. Rounded to 8 bits it may be a little small, and the largest
        # numbers are cut by half a step at most; rounded up, all others would have longer steps, which measured worse.
        scale = (x.abs().amax(dim=-1) / self._largest).clamp_min(_TINY).to(SCALE_DTYPE)
        scale += scale - scale  # NaN where it is infinite: what the code of infinity would be is not defined
        codes = (x / scale.to(x.dtype)[..., None]).round_().clamp_(-self._largest, self._largest).to(torch.int8)
        return (_pack(codes) if self._largest < 8 else codes), scale

    def decode(self, layer: int, stored: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `Codec`."""
        key_codes, key_scales, value_codes, value_scales = stored
        if self._largest < 8:
            widths = self._widths[layer]
            key_codes, value_codes = _unpack(key_codes, widths[0]), _unpack(value_codes, widths[1])
        factors = self._factors(layer, _wide(dtype), key_codes.device)
        return _decode(key_codes, key_scales, factors, dtype), _decode(value_codes, value_scales, None, dtype)


LARGEST = {"int8": 127, "int4": 7}


def channel_factors(keys: Tensor) -> Tensor:
    """Return factors [h, D] for keys like `keys` [n, h, D]: the largest magnitude of each channel, float32.

    Of all factors that keep the codes of these keys in range, those make the worst error of a score smallest.
    """
    largest = keys.detach().float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax(dim=0)
    head = largest.amax(dim=-1, keepdim=True)
    return torch.maximum(largest, _LEAST_FACTOR * torch.where(head > _TINY, head, 1.0))


def _unknown(name: object) -> ConfigError:
    return ConfigError(f"kv_dtype={name!r}; allowed: {', '.join(map(repr, LARGEST))} or None (as computed)")


def codec_of(codec: str | Codec | None) -> Codec | None:
    """Return a codec by name, without smoothing, or as it is."""
    if codec is None or isinstance(codec, str):
        return None if codec is None else QuantisedKV(codec)
    if not hasattr(codec, "decode"):
        raise _unknown(codec)
    return codec


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return what codes and scales are multiplied in for a model that computes in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _decode(codes: Tensor, scales: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide = _wide(dtype)
    x = codes.to(wide).mul_(scales.to(wide)[..., None])  # exact in float32: 7 bits by 8
    if factors is not None:
        x.mul_(factors)
    if dtype == torch.float16:  # the largest numbers, rounded up by half a step, would be infinite
        most = torch.finfo(dtype).max
        x.clamp_(-most, most)
    return x.to(dtype)


def _pack(codes: Tensor) -> Tensor:
    """[..., W] int8 in -8 .. 7 -> [..., ceil(W / 2)] uint8: the first half in the low bits, the second in the high."""
    half = (codes.shape[-1] + 1) // 2
    shifted = (codes + 8).to(torch.uint8)
    low, high = shifted[..., :half], shifted[..., half:]
    if high.shape[-1] < half:
        high = torch.nn.functional.pad(high, (0, half - high.shape[-1]))
    return low | (high << 4)


def _unpack(packed: Tensor, width: int) -> Tensor:
    """Undo `_pack`."""
    both = torch.cat([packed & 15, packed >> 4], dim=-1)
    return both[..., :width].to(torch.int8) - 8
