"""Matrix products by the number of rows: which kernel multiplies a weight fastest with 1, 2, ... rows on this CPU.

Verification runs 2 to 16 rows, which is where torch's default kernel is worst on many machines; oneDNN's
prepacked kernel needs a reordered copy of the weight. Both are timed once per weight shape and machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import ModelLoadError
from specdec.models.cache_dir import atomic_write_json, dir_lock, ensure_cache_dir
from specdec.models.progress import reporting

log = logging.getLogger("specdec")
# On an idle machine no product takes this many times longer than one with more rows of the same weights.
_DISTURBED = 3.0

ROW_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128)
# Weights of one shape are rotated so that a timed product reads memory and not the last-level cache.
ROTATE_BYTES = 96 * 2**20
LinearFunction = Callable[[Tensor], Tensor]


def prepack(weight: Tensor) -> Tensor:
    """Return oneDNN's reordered copy of a weight [out, in]."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
    return packed


def prepacked_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias through oneDNN; x [..., in]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def can_prepack(weight: Tensor) -> bool:
    """Tell whether oneDNN takes this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def cpu_name() -> str:
    """Return the processor's model name, for cache keys and provenance."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class KernelTable:
    """For each row bucket the measured times and the choice. Times in seconds per product."""

    default_s: tuple[float, ...]
    prepacked_s: tuple[float, ...]

    def by_rows(self) -> list[bool]:
        """Return, for 0 .. largest bucket rows, whether the prepacked kernel is the faster one."""
        choice: list[bool] = []
        for bucket, plain, packed in zip(ROW_BUCKETS, self.default_s, self.prepacked_s, strict=True):
            # 3 %: below that a difference is noise, and the default kernel needs no copy.
            choice.extend([packed < 0.97 * plain] * (bucket + 1 - len(choice)))
        return choice

    @property
    def wants_prepacking(self) -> bool:
        return any(self.by_rows()[1:17])

    @property
    def is_disturbed(self) -> bool:
        """True if some rows took far longer than more rows did: other work took the cores meanwhile."""
        return any(
            seconds > _DISTURBED * fastest_later
            for times in (self.default_s, self.prepacked_s)
            for seconds, fastest_later in zip(times, reversed([*accumulate(reversed(times), min)]), strict=True)
        )


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_table(shape: tuple[int, int], dtype: torch.dtype) -> KernelTable:
    """Time both kernels on random weights of one shape [out, in], for every row bucket, interleaved."""
    generator = torch.Generator().manual_seed(0)  # not the global one: what a caller samples must not depend on this
    first = torch.randn(shape, generator=generator).to(dtype)
    needed = -(-ROTATE_BYTES // (first.numel() * first.element_size()))
    plain = [first, *(torch.randn(shape, generator=generator).to(dtype) for _ in range(needed - 1))]
    packed = [prepack(w) for w in plain]
    default_s, prepacked_s = [], []
    what = f"timing products with {shape[0]} x {shape[1]} {str(dtype).removeprefix('torch.')} weights, once"
    for rows in reporting(what, ROW_BUCKETS):
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)

        def run_default(x: Tensor = x) -> None:
            for w in plain:
                F.linear(x, w)

        def run_prepacked(x: Tensor = x) -> None:
            for p in packed:
                prepacked_linear(x, p, None)

        run_default()
        run_prepacked()
        # The minimum: whatever else the machine does only ever adds time.
        pairs = [(_seconds(run_default), _seconds(run_prepacked)) for _ in range(7)]
        default_s.append(min(a for a, _ in pairs) / needed)
        prepacked_s.append(min(b for _, b in pairs) / needed)
    return KernelTable(tuple(default_s), tuple(prepacked_s))


class KernelTables:
    """Measured tables of this machine by weight shape, kept in the user cache directory."""

    def __init__(self) -> None:
        machine = [cpu_name(), torch.__version__, str(torch.get_num_threads()), str(ROW_BUCKETS)]
        self._name = f"matmul-{hashlib.sha256('|'.join(machine).encode()).hexdigest()[:16]}.json"
        self._machine = machine
        self._tables: dict[str, KernelTable] | None = None

    def get(self, shape: tuple[int, int], dtype: torch.dtype) -> KernelTable:
        """Return the table for weights [out, in] of a dtype, measuring it the first time."""
        key = f"{shape} {dtype}"
        if self._tables is None:
            self._tables = self._read()
        if key not in self._tables:
            self._tables[key] = self._kept_or_measured(key, shape, dtype)
        return self._tables[key]

    def _kept_or_measured(self, key: str, shape: tuple[int, int], dtype: torch.dtype) -> KernelTable:
        """Return what another process has timed meanwhile, or time it and add it to what the file holds."""
        table = None
        try:
            path = ensure_cache_dir() / self._name
            with dir_lock(path):  # two processes that time at once disturb each other
                kept = self._read()
                table = kept.get(key)
                if table is None:
                    kept[key] = table = _measure_soundly(key, shape, dtype)
                    tables = {
                        k: [list(t.default_s), list(t.prepacked_s)] for k, t in kept.items() if not t.is_disturbed
                    }
                    atomic_write_json(path, {"machine": self._machine, "tables": tables})
        except (OSError, ModelLoadError) as error:
            log.warning("measured kernel times could not be kept: %s", error)
        return table or _measure_soundly(key, shape, dtype)

    def _read(self) -> dict[str, KernelTable]:
        try:
            stored = json.loads((ensure_cache_dir() / self._name).read_text(encoding="utf-8"))["tables"]
            tables = {k: KernelTable(tuple(a), tuple(b)) for k, (a, b) in stored.items()}
            if all(len(t.default_s) == len(t.prepacked_s) == len(ROW_BUCKETS) for t in tables.values()):
                return {k: t for k, t in tables.items() if not t.is_disturbed}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # absent, unreadable or damaged: measured again
        return {}


def _measure_soundly(key: str, shape: tuple[int, int], dtype: torch.dtype) -> KernelTable:
    """Return `measure_table`, once more if it was disturbed; say so if it was again."""
    with torch.inference_mode():
        table = measure_table(shape, dtype)
        if table.is_disturbed:
            table = measure_table(shape, dtype)
    if table.is_disturbed:
        log.warning(
            "other work on this machine disturbed the timing of %s products; the choice of kernels may be poor, and is "
            "made anew next time",
            key,
        )
    return table


class FusedLinear(nn.Module):
    """One or several Linear layers over the same input, multiplied as one where that is faster.

    Holds the caller's own weights and, if prepacking pays, one reordered copy of them.
    """

    def __init__(self, linears: Sequence[nn.Linear], prepacked_by_rows: list[bool] | None) -> None:
        super().__init__()
        # Plain attributes, not parameters: the weights belong to the caller's model.
        self._weights: list[Tensor] = [linear.weight for linear in linears]
        self._biases = [linear.bias for linear in linears]
        self._by_rows = prepacked_by_rows or [False]
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self.extra_bytes = 0
        if any(self._by_rows):
            weight = self._weights[0] if len(linears) == 1 else torch.cat(tuple(self._weights))
            self._packed = prepack(weight)
            self.extra_bytes = weight.numel() * weight.element_size()
            if self._biases[0] is not None:
                self._bias = torch.cat(tuple(self._biases))

    @property
    def weight(self) -> Tensor:
        """[out, in] of the one layer this stands for; what is around it, such as an adapter, may look at it."""
        (weight,) = self._weights
        return weight

    @property
    def bias(self) -> Tensor | None:
        (bias,) = self._biases
        return bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        table = self._by_rows
        if self._packed is not None and table[rows if rows < len(table) else -1]:
            return prepacked_linear(x, self._packed, self._bias)
        parts = [F.linear(x, w, b) for w, b in zip(self._weights, self._biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def alike(self, x: Tensor) -> Tensor:
        """Return the products of x [T, in] such that those of a row are the same bits however many rows there are.

        Holds where the weights are prepacked: oneDNN adds up a single row in another order than several, where rows are
        long, so a lonely one gets a companion. torch's default product depends on rows and threads, and is used where
        there is no other.
        """
        if self._packed is None:
            return self(x)
        if x.shape[0] == 1:
            return prepacked_linear(x.repeat(2, 1), self._packed, self._bias)[:1]
        return prepacked_linear(x, self._packed, self._bias)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell whether a module is a Linear layer over ordinary weights, which another product may stand for."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.is_floating_point()


class KernelFactory:
    """Makes `FusedLinear`s within a bound on the extra memory."""

    def __init__(self, tables: KernelTables, limit_bytes: int) -> None:
        self._tables, self._limit, self.extra_bytes = tables, limit_bytes, 0

    def __call__(self, linears: Sequence[nn.Linear]) -> FusedLinear:
        """Return the layers as one product, prepacked where that was measured faster and fits the bound."""
        weights = [linear.weight for linear in linears]
        num_bytes = sum(w.numel() * w.element_size() for w in weights)
        biases = [linear.bias is None for linear in linears]
        fits = self.extra_bytes + num_bytes <= self._limit and len(set(biases)) == 1
        if not fits or not all(can_prepack(w) for w in weights):
            return FusedLinear(linears, None)
        table = self._tables.get((sum(int(w.shape[0]) for w in weights), int(weights[0].shape[1])), weights[0].dtype)
        layer = FusedLinear(linears, table.by_rows() if table.wants_prepacking else None)
        self.extra_bytes += layer.extra_bytes
        return layer
