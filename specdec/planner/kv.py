"""How many bytes keys and values take: as this engine stores them, and as few as the architecture needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from specdec.planner.architecture import Architecture
from specdec.planner.names import KV_BYTES

# As stored here every layer keeps every position, and latent attention its expanded keys and values. "compact" is
# what engines with ring buffers for windows and with absorbed latent projections get away with.
LAYOUTS = ("full", "compact")


@dataclass(frozen=True, slots=True)
class KvStorage:
    """Keys and values of one model in one format and layout."""

    model: Architecture
    dtype: str
    layout: str = "full"

    @property
    def is_compressed(self) -> bool:
        return self.layout == "compact" and self.model.latent is not None

    @property
    def bytes_per_layer_token(self) -> float:
        """Return the bytes of one token in one layer, scales included."""
        model = self.model
        bytes_each, scale = KV_BYTES[self.dtype]
        if self.is_compressed:
            assert model.latent is not None, "compressed means latent"
            return (model.latent.rank + model.latent.rope_dim) * bytes_each + scale
        values = model.num_kv_heads * (model.key_dim + model.value_dim)
        return values * bytes_each + 2 * model.num_kv_heads * scale

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes that one more token takes in all layers."""
        return self.bytes_per_layer_token * self.model.num_layers

    def bytes_per_request(self, context: int) -> float:
        """Return the bytes of a request of `context` tokens."""
        kept = self.model.window_counts if self.layout == "compact" else Counter({None: self.model.num_layers})
        tokens = sum(layers * _seen(context, window) for window, layers in kept.items())
        return self.bytes_per_layer_token * tokens

    def bytes_read(self, context: int) -> float:
        """Return the bytes that attention has to read after `context` tokens: of windows no more than they see."""
        tokens = sum(layers * _seen(context, window) for window, layers in self.model.window_counts.items())
        return self.bytes_per_layer_token * tokens

    def pairs(self, start: int, rows: int) -> int:
        """Return how many (query, key) pairs `rows` rows from position `start` on have, over all layers."""
        return sum(layers * _pairs(start, rows, window) for window, layers in self.model.window_counts.items())

    @property
    def flops_per_pair(self) -> int:
        """Return the FLOPs of one query and one key: their product, and the value's share of the output."""
        model = self.model
        if self.is_compressed:
            assert model.latent is not None, "compressed means latent"
            return 2 * model.num_heads * (2 * model.latent.rank + model.latent.rope_dim)
        return 2 * model.num_heads * (model.key_dim + model.value_dim)


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _pairs(start: int, rows: int, window: int | None) -> int:
    """Return the sum over i < rows of how many keys the row at position start + i sees, itself included."""
    if window is None:
        return rows * start + rows * (rows + 1) // 2
    growing = min(rows, max(0, window - start))  # rows that still see everything before them
    return growing * start + growing * (growing + 1) // 2 + (rows - growing) * window
