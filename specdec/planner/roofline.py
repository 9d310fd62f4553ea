"""The least time that work can take on a device, from its FLOPs and the bytes it has to move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does per second, in one number format."""

    flops_per_s: float
    bandwidth_bytes_per_s: float

    @property
    def balance(self) -> float:
        return self.flops_per_s / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Part:
    """Work of one kind."""

    name: str
    flops: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Parts of which nothing is known about the order: while one waits for memory another may compute.

    Source: Williams, Waterman and Patterson 2009, Roofline, doi 10.1145/1498765.1498785.
    """

    parts: tuple[Part, ...]
    rates: Rates

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts)

    @property
    def intensity(self) -> float:
        """Return FLOPs per byte moved."""
        return self.flops / self.num_bytes

    @property
    def compute_s(self) -> float:
        return self.flops / self.rates.flops_per_s

    @property
    def memory_s(self) -> float:
        return self.num_bytes / self.rates.bandwidth_bytes_per_s

    @property
    def seconds(self) -> float:
        """Return the least time: all arithmetic at the full rate, all traffic at the full bandwidth, side by side."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        """Return "compute" or "memory", whichever takes longer."""
        return "compute" if self.compute_s > self.memory_s else "memory"

    def to_dict(self) -> dict[str, Any]:
        return {**self._figures(), "parts": [{"name": p.name, **self._of(p)._figures()} for p in self.parts]}

    def _of(self, part: Part) -> Phase:
        return Phase((part,), self.rates)

    def _figures(self) -> dict[str, Any]:
        return {
            "flops": self.flops,
            "num_bytes": self.num_bytes,
            "flops_per_byte": self.intensity,
            "bound": self.bound,
            "seconds": self.seconds,
        }
