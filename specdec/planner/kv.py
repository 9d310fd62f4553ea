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
        heads = model.stored_kv_heads if self.layout == "full" else model.num_kv_heads
        return heads * (model.key_dim + model.value_dim) * bytes_each + 2 * heads * scale

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

    def bytes_read_again(self, num_tokens: int, chunk_tokens: int) -> float:
        """Return the bytes that the chunks of a prompt read of those before them; see `_earlier` for its cut."""
        counts = self.model.window_counts.items()
        earlier = sum(layers * _earlier(num_tokens, chunk_tokens, window) for window, layers in counts)
        return self.bytes_per_layer_token * earlier

    def flops(self, start: int, rows: int) -> int:
        """Return the attention FLOPs of `rows` rows from position `start` on."""
        pairs = self.pairs(start, rows)
        if not self.is_compressed:
            return self._flops_per_pair * pairs
        before = sum(layers * _seen(start, window) for window, layers in self.model.window_counts.items())
        return min(self._absorbed_flops_per_pair * pairs, self._flops_per_pair * pairs + self._expanding * before)

    def prefill_flops(self, num_tokens: int, chunk_tokens: int) -> int:
        """Return the attention FLOPs of a prompt in chunks.

        With compressed keys and values a chunk takes the cheaper way: it expands those before it anew, or it works on
        them as they are. Expanding costs by position, absorbing by pair, so the first chunks expand and, where chunks
        are short, later ones absorb.
        """
        pairs = self.pairs(0, num_tokens)
        if not self.is_compressed:
            return self._flops_per_pair * pairs
        absorbed, expanded = self._absorbed_flops_per_pair, self._flops_per_pair
        gain = absorbed - expanded
        costs = self._expanding - gain * chunk_tokens  # by earlier position, what expanding costs a chunk more
        counts = self.model.window_counts.items()
        last = num_tokens if gain > 0 else 0  # where expanding ends
        if gain > 0 and costs > 0:
            first = num_tokens % chunk_tokens
            worth = gain * chunk_tokens * (chunk_tokens + 1) // 2 // costs  # the last start where expanding is worth it
            chunks = max(0, (worth - first) // chunk_tokens + 1) if worth >= first else 0
            last = min(num_tokens, first + chunks * chunk_tokens)
        again = sum(layers * _earlier(last, chunk_tokens, window) for window, layers in counts)
        cheap = self.pairs(0, last)
        return expanded * cheap + self._expanding * again + absorbed * (pairs - cheap)

    @property
    def _flops_per_pair(self) -> int:
        """Return the FLOPs of one query and one key: their product, and the value's share of the output."""
        return 2 * self.model.num_heads * (self.model.key_dim + self.model.value_dim)

    @property
    def _absorbed_flops_per_pair(self) -> int:
        """Return the same on latent rows, whose projections are absorbed into the query's and the output's."""
        latent = self.model.latent
        assert latent is not None, "compressed means latent"
        return 2 * self.model.num_heads * (2 * latent.rank + latent.rope_dim)

    @property
    def _expanding(self) -> int:
        """Return the FLOPs that make keys and values of one latent row; of new rows they are in the dense layers."""
        latent = self.model.latent
        assert latent is not None, "compressed means latent"
        return 2 * latent.rank * self.model.num_heads * (latent.nope_dim + self.model.value_dim)


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _pairs(start: int, rows: int, window: int | None) -> int:
    """Return the sum over i < rows of how many keys the row at position start + i sees, itself included."""
    if window is None:
        return rows * start + rows * (rows + 1) // 2
    growing = min(rows, max(0, window - start))  # rows that still see everything before them
    return growing * start + growing * (growing + 1) // 2 + (rows - growing) * window


def _earlier(num_tokens: int, chunk_tokens: int, window: int | None) -> int:
    """Return the sum over a prompt's chunks of how many positions before them they see.

    The chunk that is not full comes first, which makes the sum the smallest of all ways to cut.
    """
    chunks, start = divmod(num_tokens, chunk_tokens)
    growing = chunks if window is None else min(chunks, max(0, -((start - window) // chunk_tokens)))
    full = 0 if window is None else (chunks - growing) * window
    return growing * start + chunk_tokens * growing * (growing - 1) // 2 + full
