"""What has to be in memory at once, and how much more fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.planner.kv import KvStorage
from specdec.planner.model import PlannedModel

_MOST = 2**40


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Everything that takes device memory, as functions of batch and context. All in bytes."""

    model: PlannedModel
    weight_bytes: float
    kv: KvStorage
    value_bytes: float  # of one number of an activation
    chunk_tokens: int
    rows_per_request: int  # of a decode step, drafts included
    drafter_bytes: float = 0.0
    drafter_kv: KvStorage | None = None

    def kv_of(self, batch: int, context: int) -> float:
        return batch * self.kv.bytes_per_request(context)

    def drafter_kv_of(self, batch: int, context: int) -> float:
        return 0.0 if self.drafter_kv is None else batch * self.drafter_kv.bytes_per_request(context)

    def activations(self, batch: int, context: int) -> float:
        """Return an estimate of the widest moment of a forward.

        The residual stream twice, the wider of a layer's attention inputs and its feed-forward's, a mask of one number
        per row and position, and float32 logits twice (as they are, and as probabilities).
        """
        shape = self.model.shape
        decode_rows = batch * self.rows_per_request
        rows = max(min(self.chunk_tokens, batch * context), decode_rows)
        heads = shape.num_heads * (shape.key_dim + shape.value_dim) + shape.num_kv_heads * (
            shape.key_dim + shape.value_dim
        )
        experts = shape.experts
        inner = 3 * shape.inner
        if experts is not None:
            inner = max(inner, 3 * experts.inner * (experts.chosen + experts.num_shared))
        per_row = 2 * shape.hidden_size + max(heads, inner) + context
        return rows * per_row * self.value_bytes + 2 * 4.0 * decode_rows * shape.vocab_size

    def total(self, batch: int, context: int) -> float:
        return (
            self.weight_bytes
            + self.drafter_bytes
            + self.kv_of(batch, context)
            + self.drafter_kv_of(batch, context)
            + self.activations(batch, context)
        )

    def most_requests(self, usable_bytes: float, context: int) -> int:
        """Return how many requests of `context` tokens fit at once."""
        return _most(lambda batch: self.total(batch, context) <= usable_bytes)

    def longest_context(self, usable_bytes: float, batch: int) -> int:
        """Return how many tokens each of `batch` requests can have."""
        return _most(lambda context: self.total(batch, context) <= usable_bytes)

    def to_dict(self, usable_bytes: float, device_bytes: int, batch: int, context: int) -> dict[str, Any]:
        shape = self.model.shape
        least = KvStorage(shape, self.kv.dtype, "compact")
        full = KvStorage(shape, self.kv.dtype, "full")
        total = self.total(batch, context)
        return {
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_of(batch, context),
            "activation_bytes": self.activations(batch, context),
            "drafter_weight_bytes": self.drafter_bytes,
            "drafter_kv_bytes": self.drafter_kv_of(batch, context),
            "total_bytes": total,
            "device_bytes": device_bytes,
            "usable_bytes": usable_bytes,
            "free_bytes": usable_bytes - total,
            "fits": total <= usable_bytes,
            "num_devices_by_memory": max(1, -int(-total // usable_bytes)),
            "kv_bytes_per_token": self.kv.bytes_per_token,
            "kv_bytes_per_request": self.kv.bytes_per_request(context),
            "kv_bytes_per_request_full": full.bytes_per_request(context),
            "kv_bytes_per_request_compact": least.bytes_per_request(context),
            "max_batch": self.most_requests(usable_bytes, context),
            "max_context_tokens": self.longest_context(usable_bytes, batch),
        }


def _most(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, 0 if none does; what fits only shrinks as numbers grow."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
