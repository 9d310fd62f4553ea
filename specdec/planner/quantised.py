"""How many bytes a weight of a quantised checkpoint takes: by its files, else by its quantization_config.

Numbers and scales per group are those of the methods' own formats; what is small beside them (zero points of whole
rows, permutations, scales per row) is left out. Norms and routers count with the layers they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from specdec.errors import ConfigError
from specdec.planner.stored import Tensor
from specdec.planner.weights import PARTS, Packed, Weights, part_of

_PLAIN = 1.9  # bytes of a weight, from which on a part counts as not quantised: norms and scales make it uneven
_NAMES = ("quantization_config", "compression_config")
_NOT_CONVERTED = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "ignored_layers")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What a config says of how its checkpoint is quantised."""

    method: str
    bits: float | None  # of a weight with its share of scales; None = not known to the planner
    experts_only: bool = False
    head: bool = False  # the output matrix is quantised too

    def packed(self, weights: Weights) -> Packed:
        """Return the bytes of a weight of each part; embeddings are never quantised."""
        size = None if self.bits is None else self.bits / 8
        dense = None if self.experts_only and weights.experts else size
        return Packed(dense, size, None, size if self.head else None)


def quantisation_of(fields: dict[str, Any], text: dict[str, Any], name: str) -> Quantisation | None:
    """Return how a checkpoint is quantised, or None.

    Args:
        fields: of the config.json.
        text: of its text part.
        name: of the model, for messages.

    Raises:
        ConfigError: a value makes no sense.
    """
    said = next((part[key] for part in (fields, text) for key in _NAMES if part.get(key) is not None), None)
    if said is None:
        return None
    where = f"{name}: quantization_config"
    if not isinstance(said, dict):
        raise ConfigError(f"{where} is {said!r:.60} in its config; allowed: an object with fields")
    method = said.get("quant_method") or said.get("quant_type") or _bitsandbytes(said)
    if not isinstance(method, str):
        raise ConfigError(f"{where}.quant_method is {method!r:.60} in its config; allowed: a name, such as gptq")
    method = method.lower()
    bits = _BITS.get(method.replace("-", "_"))
    skipped = [str(item) for key in _NOT_CONVERTED for item in _listed(said, key, where)]
    without_attention = any("attn" in item or "attention" in item for item in skipped)
    return Quantisation(
        method=method,
        bits=None if bits is None else bits(said, where),
        experts_only=method == "mxfp4" or without_attention,
        head=said.get("lm_head") is True,
    )


def packed_by_files(tensors: Iterable[Tensor], weights: Weights) -> Packed:
    """Return the bytes of a weight of each part, from what files hold of a model with so many weights."""
    sums = dict.fromkeys(PARTS, 0)
    for tensor in tensors:
        sums[part_of(tensor.name)] += tensor.num_bytes
    sizes = {part: sums[part] / count for part in PARTS if (count := getattr(weights, part))}
    return Packed(**{part: size for part, size in sizes.items() if 0 < size < _PLAIN})


def _bitsandbytes(said: dict[str, Any]) -> str | None:
    return "bitsandbytes" if said.get("load_in_4bit") or said.get("load_in_8bit") else None


def _listed(said: dict[str, Any], key: str, where: str) -> list[Any]:
    found = said.get(key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise ConfigError(f"{where}.{key} is {found!r:.60} in its config; allowed: a list of names")
    return found


def _number(said: dict[str, Any], names: tuple[str, ...], where: str, default: int, low: int, high: int) -> int:
    for key in names:
        found = said.get(key)
        if found is None:
            continue
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            raise ConfigError(
                f"{where}.{key} is {found!r:.60} in its config; allowed: a whole number from {low} to {high:,}"
            )
        return found
    return default


def _grouped(said: dict[str, Any], where: str) -> float:
    """GPTQ's, AWQ's and AutoRound's: a 16-bit scale and a zero point per group; -1 = one group per row."""
    bits = _number(said, ("bits", "w_bit"), where, 4, 1, 16)
    group = _number(said, ("group_size", "q_group_size"), where, 128, -1, 2**20)
    return bits + (16 + bits) / group if group > 0 else bits


def _of_bitsandbytes(said: dict[str, Any], where: str) -> float:
    if said.get("load_in_8bit"):
        return 8
    # A float32 scale per 64 weights, or an 8-bit one and a float32 one for 256 of those.
    return 4 + (8 / 64 + 32 / (64 * 256) if said.get("bnb_4bit_use_double_quant") else 32 / 64)


def _fp8(said: dict[str, Any], where: str) -> float:
    block = _listed(said, "weight_block_size", where)
    if not all(isinstance(size, int) and 1 <= size <= 2**20 for size in block):
        raise ConfigError(f"{where}.weight_block_size is {block!r:.60} in its config; allowed: two whole numbers")
    return 8 + (32 / prod(block) if block else 0)


def _compressed_tensors(said: dict[str, Any], where: str) -> float:
    groups = said.get("config_groups")
    schemes = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    found = []
    for scheme in schemes:
        if isinstance(scheme, dict):
            group = _number(scheme, ("group_size",), where, -1, -1, 2**20)
            found.append(_number(scheme, ("num_bits",), where, 8, 1, 16) + (16 / group if group > 0 else 0))
    return max(found, default=16.0)


def _quanto(said: dict[str, Any], where: str) -> float:
    digits = "".join(c for c in str(said.get("weights") or "int8") if c.isdigit())
    return _number({"weights": int(digits[:3] or 0)}, ("weights",), where, 8, 1, 16)


_BITS: dict[str, Callable[[dict[str, Any], str], float]] = {
    **dict.fromkeys(("gptq", "awq", "auto_round", "intel/auto_round"), _grouped),
    "bitsandbytes": _of_bitsandbytes,
    **dict.fromkeys(("fp8", "fbgemm_fp8", "finegrained_fp8"), _fp8),
    "mxfp4": lambda said, where: 4 + 8 / 32,  # an 8-bit exponent per 32 weights
    "compressed_tensors": _compressed_tensors,
    "quanto": _quanto,
    "eetq": lambda said, where: 8,
    "bitnet": lambda said, where: 2,
}
