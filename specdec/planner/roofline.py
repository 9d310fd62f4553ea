"""The least time that work can take on a device, from its FLOPs and the bytes it has to move."""

from __future__ import annotations

from collections.abc import Iterable
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
    """Work of one kind: arithmetic and traffic may overlap within it.

    Source: Williams, Waterman and Patterson 2009, Roofline, doi 10.1145/1498765.1498785.
    """

    name: str
    flops: float
    num_bytes: float

    def seconds(self, rates: Rates) -> float:
        return max(self.flops / rates.flops_per_s, self.num_bytes / rates.bandwidth_bytes_per_s)

    def bound(self, rates: Rates) -> str:
        """Return "compute" or "memory", whichever takes longer."""
        return "compute" if self.flops / rates.flops_per_s > self.num_bytes / rates.bandwidth_bytes_per_s else "memory"


@dataclass(frozen=True, slots=True)
class Phase:
    """Parts that follow one another: each layer's attention waits for its projections."""

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
    def seconds(self) -> float:
        return sum(part.seconds(self.rates) for part in self.parts)

    @property
    def memory_share(self) -> float:
        """Return the share of the time in which memory is what is waited for."""
        return sum(p.seconds(self.rates) for p in self.parts if p.bound(self.rates) == "memory") / self.seconds

    @property
    def bound(self) -> str:
        """Return "compute" or "memory", whichever bounds most of the time."""
        return "memory" if self.memory_share >= 0.5 else "compute"

    def to_dict(self) -> dict[str, Any]:
        return {
            "flops": self.flops,
            "num_bytes": self.num_bytes,
            "flops_per_byte": self.intensity,
            "bound": self.bound,
            "memory_bound_share": self.memory_share,
            "seconds": self.seconds,
            "parts": [_row(name, self._named(name)) for name in dict.fromkeys(part.name for part in self.parts)],
        }

    def _named(self, name: str) -> Phase:
        return Phase(tuple(part for part in self.parts if part.name == name), self.rates)


def _row(name: str, phase: Phase) -> dict[str, Any]:
    return {
        "name": name,
        "flops": phase.flops,
        "num_bytes": phase.num_bytes,
        "flops_per_byte": phase.intensity,
        "bound": phase.bound,
        "seconds": phase.seconds,
    }


def total(phases: Iterable[Phase]) -> list[Part]:
    """Return one part per name and bound, summed over phases that follow one another."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for phase in phases:
        for part in phase.parts:
            key = (part.name, part.bound(phase.rates))
            flops, num_bytes = sums.get(key, (0.0, 0.0))
            sums[key] = (flops + part.flops, num_bytes + part.num_bytes)
    return [Part(name, flops, num_bytes) for (name, _), (flops, num_bytes) in sums.items()]
